"""Passes over the layers of a recording: their progress, and the kinds of their heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from regard.analysis.head_classes import classify, survey_of, trials_of
from regard.analysis.head_kinds import Head
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction


def reduced(
    matrix: AttentionMatrix, reductions: Sequence[Reduction], call: Callable[[int], object]
) -> tuple[Any, ...]:
    """Return a matrix's answers to some reductions; ``call`` gets the rows of each block."""
    rows, done = prod(matrix.shape[:-1]), 0

    def count(finished: int, blocks: int) -> None:
        nonlocal done
        new = rows * finished // blocks - done
        if new > 0:  # a pass that starts again on another backend counts again
            done += new
            call(new)

    answers = matrix.reduce(*reductions, progress=count)
    return answers if len(reductions) > 1 else (answers,)


def layer_kinds(
    recording: Recording, place: int, call: Callable[[int], object]
) -> list[Head | None]:
    """Return the heads of one layer with their kinds; None for each where it has a NaN.

    Args:
        recording: what was seen.
        place: of the layer.
        call: called with the rows of each block.
    """
    layer, tokens = recording.layers[place], (recording.query_tokens, recording.key_tokens)
    asked = survey_of(layer, *tokens).reductions
    missing = [reduction for reduction in asked if reduction not in layer.answers]
    if missing:
        found = zip(missing, reduced(layer.whole(), missing, call), strict=True)
        layer = replace(layer, answers=Answers(found).before(layer.answers))
    try:
        heads = classify([layer], *tokens, trials=trials_of(recording))
    except RegardError:
        return [None] * (layer.shape[-3] if len(layer.shape) > 2 else 1)
    return [replace(head, layer=layer.model_index(place)) for head in heads]
