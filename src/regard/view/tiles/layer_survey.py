"""One pass over each layer: what the page asks of it and what tells the kinds of its heads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from regard.analysis.head_classes import classify, survey_of
from regard.analysis.head_kinds import Head
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, Layer
from regard.recording.recording import Recording
from regard.reductions.block import RowStatistics
from regard.reductions.reduction import Contribution, Reduction
from regard.text.tokens import Token
from regard.view.tiles.manifest import head_records

__all__ = ["EachBlock", "Sweeps", "Tally", "answered", "known_kinds", "swept"]

_LONG = 2**20  # so many scores of a head are a block of their own


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


def answered(layer: Layer, reductions: Sequence[Reduction], pause: Callable[[], None]) -> Layer:
    """Return a layer that holds the answers to some reductions.

    Args:
        layer: with its matrix.
        reductions: the questions.
        pause: called before each block of rows; what it raises ends the pass.
    """
    missing = [reduction for reduction in reductions if reduction not in layer.answers]
    if not missing:
        return layer
    found = layer.whole().reduce(*missing, EachBlock(lambda _: pause()))
    pairs = zip(missing, found[:-1], strict=True)
    return replace(layer, answers=Answers(pairs).before(layer.answers))


def known_kinds(
    layer: Layer,
    place: int,
    query_tokens: Sequence[Token] | None,
    key_tokens: Sequence[Token] | None,
) -> list[Head | None]:
    """Every head of one layer with its kind; None for each where the layer has a NaN.

    Args:
        layer: with the answers that tell the kinds, or that can be asked.
        place: of the layer in its recording.
        query_tokens: as for ``classify``.
        key_tokens: likewise.
    """
    try:
        heads = classify([layer], query_tokens, key_tokens)
    except RegardError:
        return [None] * (layer.shape[-3] if len(layer.shape) > 2 else 1)
    return [replace(head, layer=layer.place(place)) for head in heads]


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
        return head_records(
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
