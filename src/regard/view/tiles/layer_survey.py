"""One pass over each layer: what the page asks of it and what tells the kinds of its heads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.analysis.head_classes import survey_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, Layer
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction
from regard.view.tiles.each_block import EachBlock
from regard.view.tiles.layer_kinds import known_kinds
from regard.view.tiles.manifest import told

__all__ = ["Sweeps", "Tally", "swept"]

_LONG = 2**20  # so many scores of a head are a block of their own


@dataclass
class Tally:
    """The number of finished rows; several threads may count.

    Attributes:
        rows: in all, those of every head.
        tell: called with the rows done and the rows in all.
        done: rows so far.
    """

    rows: int
    tell: Callable[[int, int], None] | None
    done: int = 0
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: int) -> None:
        """So many more are done."""
        with self._alone:
            self.done += rows
            if self.tell is not None:
                self.tell(self.done, self.rows)


def swept(matrix: AttentionMatrix, reductions: Sequence[Reduction], tally: Tally) -> list[Any]:
    """Compute the answers to several reductions in one pass.

    Long heads are asked one by one: the strongest keys of all of them may not fit into memory.

    Args:
        matrix: (num_heads, q_len, kv_len), or with other axes before them.
        reductions: the questions; each answer must have the first axis of the matrix.
        tally: told of the rows as they pass.
    """
    step = 1 if prod(matrix.shape[-2:]) > _LONG else matrix.shape[0]
    parts = [matrix[start : start + step] for start in range(0, matrix.shape[0], step)]
    found = [part.reduce(*reductions, EachBlock(tally.add))[:-1] for part in parts]
    return [_joined(answers) for answers in zip(*found, strict=True)]


def _joined(answers: Sequence[Any]) -> Any:
    """Concatenate the answers of some heads."""
    if len(answers) == 1:
        return answers[0]
    if isinstance(answers[0], Tensor):
        return torch.cat(tuple(answers))
    return type(answers[0])(*(torch.cat(parts) for parts in zip(*answers, strict=True)))


class Sweeps:
    """The passes over the layers of a recording.

    Args:
        recording: what was seen.
        ask_kinds: whether what tells the kinds of the heads is asked in the same passes.
        progress: called with the rows done and the rows in all, those of every head.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        ask_kinds: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._tokens = recording.query_tokens, recording.key_tokens
        self._layers = list(recording.layers)
        self._missing = [self._unknown(layer) if ask_kinds else [] for layer in self._layers]
        pairs = zip(self._layers, self._missing, strict=True)
        self._tally = Tally(sum(_rows(layer, missing) for layer, missing in pairs), progress)

    def over(
        self, place: int, matrix: AttentionMatrix, questions: Sequence[Reduction]
    ) -> list[Any]:
        """Return a layer's answers to some reductions, and cache them.

        Args:
            place: of the layer in the recording.
            matrix: its first sequence as it is shown, (num_heads, q_len, kv_len). Of a recording of
                one sequence the kinds are told of these numbers too.
            questions: as for ``swept``.
        """
        layer, missing = self._layers[place], self._missing[place]
        if _sequences(layer) > 1:
            found = swept(matrix, questions, self._tally)
            known = swept(layer.whole(), missing, self._tally) if missing else []
        else:
            both = swept(matrix, [*questions, *missing], self._tally)
            found, known = both[: len(questions)], both[len(questions) :]
            known = [each.reshape(*layer.shape[:-2], *each.shape[1:]) for each in known]
        pairs = zip(missing, known, strict=True)
        self._layers[place] = replace(layer, answers=Answers(pairs).before(layer.answers))
        return found

    def kinds(self) -> list[dict[str, Any] | None]:
        """Return the kind of every head, layer by layer, as the page expects it.

        None for each head of a layer whose weights are not all numbers.
        """
        layers = enumerate(self._layers)
        return told(
            head for place, layer in layers for head in known_kinds(layer, place, *self._tokens)
        )

    def _unknown(self, layer: Layer) -> list[Reduction]:
        asked = survey_of(layer, *self._tokens).reductions
        return [reduction for reduction in asked if reduction not in layer.answers]


def _sequences(layer: Layer) -> int:
    return prod(layer.shape[:-3])


def _rows(layer: Layer, missing: Sequence[Reduction]) -> int:
    """Return the number of rows that the passes over a layer will count."""
    rows = prod(layer.shape[:-1])
    count = _sequences(layer)
    return rows // count + (rows if missing and count > 1 else 0)
