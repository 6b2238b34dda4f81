"""What kind of head is this: where its attention goes, in the mean over a text.

The scores are the ones the field uses to describe heads (Clark et al. 2019, "What Does BERT Look
At?", section 3; Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 5.1), with one
change of ours: all of them leave out special tokens and the first token as queries, and the
neighbour scores leave out those two as keys as well, so that a sink never counts as a neighbour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from regard.block import Block
from regard.errors import RegardError
from regard.matrix import AttentionMatrix
from regard.recording import Recording
from regard.reductions import Diagonal, OfEachRow, Part, Segments

__all__ = ["KINDS", "Head", "Kind", "Spread", "classify", "stand_out"]


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        name: what it is called.
        letter: for one cell of a grid; upper case when the score is strong.
        least: the score that makes a head one of this kind; ours.
        strong: the score from which on it is one clearly; ours.
        reason: why, with a place for the score.
    """

    name: str
    letter: str
    least: float
    strong: float
    reason: str


_PREVIOUS = Kind("previous token", "p", 0.5, 0.75, "puts {} of its attention on the token before")
_NEXT = Kind("next token", "n", 0.5, 0.75, "puts {} of its attention on the token after")
_SELF = Kind("same token", "i", 0.5, 0.75, "puts {} of its attention on the token itself")
_FIRST = Kind("first token", "f", 0.5, 0.75, "puts {} of its attention on the first token")
_SEPARATOR = Kind("separator", "s", 0.5, 0.75, "puts {} of its attention on separators")
_SPREAD = Kind("spread out", "e", 0.9, 0.97, "has {} of the entropy of even attention")
_MIXED = Kind("mixed", "·", 0.0, 1.1, "puts no more than {} on any of these")

KINDS = (_PREVIOUS, _NEXT, _SELF, _FIRST, _SEPARATOR, _SPREAD, _MIXED)
"""Every kind, in the order in which they are shown.

- previous, next, same token: the mean weight on the token before, after, or itself.
- first token: the mean weight on position 0, the attention sink of Xiao et al. 2023, "Efficient
  Streaming Language Models with Attention Sinks"; in BERT it is [CLS].
- separator: the mean weight on all special tokens but the first position, the "no-op" of Clark
  et al. 2019, section 3.2.
- spread out: the mean of each query's entropy as a share of the most it could have, the logarithm
  of the number of keys that it may attend to.
- mixed: none of them.
"""


@dataclass(frozen=True)
class Head:
    """One head: what kind it is, and why.

    Attributes:
        layer: its layer's place in the recording, from 0.
        head: its place in the layer, from 0.
        kind: the name of its kind.
        score: the score that makes it one; for a mixed head its largest mean weight.
        scores: every score by the name of its kind, from 0 to 1.

    Example:
        >>> from regard.heads import Head
        >>> Head(5, 3, "mixed", 0.4, {}).name
        'L5H3'
    """

    layer: int
    head: int
    kind: str
    score: float
    scores: dict[str, float]

    @property
    def name(self) -> str:
        """Layer and head as the field writes them, both from 0."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Spread(OfEachRow):
    """How evenly each query spreads its attention, from 0 (one key) to 1 (all keys alike).

    The entropy of its weights as a share of log(n), n the number of keys that it may attend to; 0
    where n is 1 or 0. The answer has shape (..., num_heads, q_len). Ours.

    Example:
        >>> import torch, regard
        >>> from regard.heads import Spread
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(Spread())
        tensor([0., 1., 1.])
    """

    def update(self, block: Block) -> tuple[Part, ...]:
        entropy = -torch.xlogy(block.weights, block.weights).sum(-1)
        # Some models mask by adding the lowest number of their dtype, -65504 in float16.
        keys = (block.scores > block.maximum - 10_000).sum(-1)
        # One key has log 1 = 0 and entropy 0: any divisor but 0 gives 0.
        return (Part(block.box.at_rows, entropy / keys.clamp(min=2).log()),)


def classify(
    recording: Recording, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Head, ...]:
    """Every head of a recording with its kind, from one pass over each layer.

    A head is of the kind whose score is largest among those that reach their ``least``. Without
    tokens none counts as special.

    Args:
        recording: of self-attention, one text.
        progress: called with the layers done and the layers in all.

    Raises:
        ValueError: a layer has more than one text, or attends to another text.
        RegardError: a layer's weights are not numbers (NaN).

    Example:
        >>> import torch, regard
        >>> from regard.heads import classify
        >>> even = regard.attend(torch.zeros(4, 1), torch.zeros(4, 1))
        >>> [head] = classify(regard.Recording({"layer": even}))
        >>> head.name, head.kind, head.score
        ('L0H0', 'spread out', 1.0)
    """
    heads: list[Head] = []
    for layer, name in enumerate(recording):
        matrix = one_text(recording, name)
        if matrix.shape[-2] != matrix.shape[-1]:
            raise ValueError(
                f"layer {name!r} has q_len {matrix.shape[-2]} and kv_len {matrix.shape[-1]}; "
                "kinds of heads are told for a text that attends to itself."
            )
        special = [token.special for token in recording.query_tokens or ()]
        scores = _scores(matrix, special or [False] * matrix.shape[-1])
        if any(isnan(value) for values in scores.values() for value in values):
            raise RegardError(f"layer {name!r} has weights that are not numbers (NaN).")
        for head, values in enumerate(zip(*scores.values(), strict=True)):
            named = dict(zip(scores, values, strict=True))
            kind, score = _kind(named)
            heads.append(Head(layer, head, kind.name, score, named))
        if progress is not None:
            progress(layer + 1, len(recording))
    return tuple(heads)


def one_text(recording: Recording, name: str) -> AttentionMatrix:
    """A layer as a matrix of shape (num_heads, q_len, kv_len), or without heads as it is.

    Raises:
        ValueError: the layer holds several texts.
    """
    matrix = recording[name]
    if any(n != 1 for n in matrix.shape[:-3]):
        raise ValueError(
            f"layer {name!r} has shape {tuple(matrix.shape)}; one text is looked at, a batch of 1."
        )
    return matrix[(0,) * (matrix.ndim - 3)] if matrix.ndim > 3 else matrix


def _scores(matrix: AttentionMatrix, special: Sequence[bool]) -> dict[str, list[float]]:
    """Each score of each head, by the name of the kind that it makes."""
    text = {place for place, is_special in enumerate(special) if place and not is_special}
    queries = sorted(text) or list(range(len(special)))
    query_spans = _runs(queries)
    key_spans = [(0, 1), *_runs([i for i, is_special in enumerate(special) if i and is_special])]
    before, own, after, spread, segments = matrix.reduce(
        Diagonal(-1), Diagonal(), Diagonal(1), Spread(), Segments(query_spans, key_spans)
    )
    lengths = segments.new_tensor([stop - start for start, stop in query_spans])
    shares = torch.einsum("q,...qk->...k", lengths, segments) / len(queries)
    named = {
        _PREVIOUS.name: _mean(before, [q - 1 for q in queries if q - 1 in text]),
        _NEXT.name: _mean(after, [q for q in queries if q + 1 in text]),
        _SELF.name: _mean(own, queries),
        _FIRST.name: shares[..., 0],
        _SEPARATOR.name: shares[..., 1:].sum(-1),
        _SPREAD.name: _mean(spread, queries),
    }
    return {name: values.reshape(-1).tolist() for name, values in named.items()}


def _mean(values: Tensor, places: list[int]) -> Tensor:
    """The mean of the values at these places; 0 where there are none."""
    return values[..., places].mean(-1) if places else values.new_zeros(values.shape[:-1])


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Rising places as spans (start, stop)."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans


def _kind(scores: dict[str, float]) -> tuple[Kind, float]:
    reached = [kind for kind in KINDS[:-1] if scores[kind.name] >= kind.least]
    if not reached:
        return _MIXED, max(score for name, score in scores.items() if name != _SPREAD.name)
    kind = max(reached, key=lambda kind: scores[kind.name])
    return kind, scores[kind.name]


def stand_out(heads: Sequence[Head]) -> tuple[tuple[Head, str], ...]:
    """For each kind the head that is it most, and why in words; mixed heads do not stand out.

    Args:
        heads: from ``classify``.

    Example:
        >>> from regard.heads import Head, stand_out
        >>> stand_out([Head(0, 2, "previous token", 0.96, {})])[0][1]
        'puts 96 % of its attention on the token before'
    """
    found: list[tuple[Head, str]] = []
    for kind in KINDS:
        alike = [head for head in heads if head.kind == kind.name]
        if alike and kind is not _MIXED:
            best = max(alike, key=lambda head: head.score)
            found.append((best, kind.reason.format(f"{100 * best.score:.0f} %")))
    return tuple(found)
