"""One pass over each layer: what the page asks of it and what tells the kinds of its heads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from regard.analysis.head_classes import classify, survey_of
from regard.analysis.head_kinds import Head
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, InMemory, Layer
from regard.recording.recording import Recording
from regard.reductions.block import RowStatistics
from regard.reductions.reduction import Contribution, Reduction
from regard.text.tokens import Token
from regard.view.tiles.manifest import head_records

__all__ = ["EachBlock", "Sweeps", "answered", "known_kinds"]


@final
@dataclass(frozen=True, eq=False)
class EachBlock(Reduction):
    """A reduction without an answer that calls a function for each block of a pass.

    Args:
        call: called with the number of rows of all heads, on several threads; what it raises ends
            the pass.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.layer_survey import EachBlock
        >>> even = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> even.reduce(regard.Pool(1, 1), EachBlock(print))[0]
        2
        tensor([[0.5000]])
    """

    thread_safe = True
    reads_statistics = True

    call: Callable[[int], object]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return ()

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        self.call(prod(part.stop - part.start for part in block.box.at_rows))
        return ()

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> None:
        return None


def answered(layer: Layer, reductions: Sequence[Reduction], call: Callable[[int], object]) -> Layer:
    """Return a layer that holds the answers to some reductions."""
    missing = [reduction for reduction in reductions if reduction not in layer.answers]
    if not missing:
        return layer
    found = layer.whole().reduce(*missing, EachBlock(call))
    pairs = zip(missing, found[:-1], strict=True)
    return replace(layer, answers=Answers(pairs).before(layer.answers))


def known_kinds(
    layer: Layer,
    place: int,
    query_tokens: Sequence[Token] | None,
    key_tokens: Sequence[Token] | None,
) -> list[Head | None]:
    """Every head of one layer with its kind; None for each where the layer has a NaN."""
    try:
        heads = classify([layer], query_tokens, key_tokens)
    except RegardError:
        return [None] * (layer.shape[-3] if len(layer.shape) > 2 else 1)
    return [replace(head, layer=layer.place(place)) for head in heads]


class Sweeps:
    """The passes over the layers of a recording: one for each layer, or two for a batch.

    Args:
        recording: what was seen.
        ask_kinds: whether the same passes tell the kinds of the heads.
        progress: called with the rows done and the rows in all, those of every head.

    Attributes:
        kinds: of each layer that was passed, its heads with their kinds, as the page expects them.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        ask_kinds: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.kinds: dict[int, list[dict[str, Any] | None]] = {}
        self._recording = recording
        self._ask_kinds = ask_kinds
        self._progress = progress
        self._alone = threading.Lock()
        self._done = 0
        self._rows = sum(
            prod(layer.shape[-3:-1]) + (prod(layer.shape[:-1]) if self._is_batch(layer) else 0)
            for layer in recording.layers
        )

    def over(
        self, place: int, matrix: AttentionMatrix, questions: Sequence[Reduction]
    ) -> list[Any]:
        """Return a layer's answers to some reductions.

        Args:
            place: of the layer in the recording.
            matrix: its first sequence as it is shown, (num_heads, q_len, kv_len). Of a recording of
                one sequence the kinds are told of these numbers too.
            questions: the reductions.
        """
        layer = self._recording.layers[place]
        shown = replace(layer, shape=matrix.shape, matrix=InMemory(matrix), answers=Answers())
        whole = layer if self._is_batch(layer) else shown
        tokens = self._recording.query_tokens, self._recording.key_tokens
        of_kinds = survey_of(whole, *tokens).reductions if self._ask_kinds else ()
        shown = answered(shown, [*questions, *(of_kinds if whole is shown else ())], self._count)
        if self._ask_kinds:
            whole = shown if whole is not layer else answered(layer, of_kinds, self._count)
            self.kinds[place] = head_records(known_kinds(whole, place, *tokens))
        return [shown.answers[question] for question in questions]

    def _is_batch(self, layer: Layer) -> bool:
        """Return True if the kinds need a pass of their own, over all sequences of a batch."""
        return self._ask_kinds and prod(layer.shape[:-3]) > 1

    def _count(self, rows: int) -> None:
        with self._alone:  # several threads count
            self._done += rows
            if self._progress is not None:
                self._progress(self._done, self._rows)
