"""Numbers of every row of a recorded layer, from one pass over its matrix."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.recording.layers import Layer, asked_of
from regard.reductions.products import WeightTile
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore, NormalizedEntropy
from regard.reductions.sums import Diagonal
from regard.scores.query_key import QueryKeyScores

LOCAL = 8
"""The local window has the keys that are at most this many tokens away from the query."""

_OF_ROWS: dict[str, Reduction] = {
    "max_score": MaxScore(),
    "logsumexp": LogSumExp(),
    "entropy": Entropy(),
    "normalized_entropy": NormalizedEntropy(),
}
_DISTANCES = {
    "diagonal": range(1),
    "previous_token": range(-1, 0),
    "local_window": range(-LOCAL, LOCAL + 1),
}
STATISTICS = (*_OF_ROWS, "first_token", *_DISTANCES, "query_norm", "key_norm")
"""The names of the statistics; ``docs/training.md`` defines each."""


class Samples(NamedTuple):
    """The statistics of a layer: for each statistic and head one number a row.

    Attributes:
        names: the statistics.
        values: (names, num_heads, n), float32, in rising order; rows that do not count are +inf.
        rows: the number of rows that count, (names, num_heads).
        total: the sum over these rows, (names, num_heads), float64.
        highest: the largest of these numbers, (names, num_heads).
    """

    names: tuple[str, ...]
    values: Tensor
    rows: Tensor
    total: Tensor
    highest: Tensor

    @classmethod
    def of(cls, numbers: Mapping[str, tuple[Tensor, Tensor]]) -> "Samples":
        """Return the samples of numbers by statistic, each beside True for rows that count.

        Numbers are (entries, num_heads, n), what counts (entries, 1 or num_heads, n).
        """
        most = max(of.shape[-1] for of, _ in numbers.values())
        pairs = [(pad(of, (0, most - of.shape[-1])), there) for of, there in numbers.values()]
        values = torch.stack([of.float() for of, _ in pairs])
        there = [pad(each, (0, most - each.shape[-1])).expand(values[0].shape) for _, each in pairs]
        counts = torch.stack(there).transpose(1, 2).flatten(2)
        values = values.transpose(1, 2).flatten(2)
        return cls(
            tuple(numbers),
            values.masked_fill(~counts, torch.inf).sort(-1).values,
            counts.sum(-1),
            values.masked_fill(~counts, 0).sum(-1, dtype=torch.float64),
            values.masked_fill(~counts, -torch.inf).amax(-1),
        )


@torch.no_grad()
def samples_of(layer: Layer, statistics: Sequence[str]) -> Samples | None:
    """Return samples of the statistics that a layer has; None if it has none of them.

    A row counts if it may attend to a key and is not padding. A layer that was recorded as weights
    has no scores and no norms. Statistics of distances need queries and keys of one text.
    """
    matrix, texts = layer.whole(), _Texts(layer)
    source = matrix.source if isinstance(matrix.source, QueryKeyScores) else None
    questions: dict[Any, Reduction] = {"max_score": MaxScore()}
    questions |= {name: _OF_ROWS[name] for name in statistics if name in _OF_ROWS}
    first_keys = texts.first_keys if "first_token" in statistics else {}
    for first in first_keys:
        questions["column", first] = WeightTile(range(matrix.shape[-2]), range(first, first + 1))
    distances = [name for name in statistics if name in _DISTANCES and layer.reads_itself]
    for offset in sorted({offset for name in distances for offset in _DISTANCES[name]}):
        questions[offset] = Diagonal(texts.start + offset)
    computed = asked_of(matrix, list(questions.values()))
    answers = dict(zip(questions, map(texts.by_head, computed), strict=True))
    counts = texts.queries & (answers["max_score"] != -torch.inf)
    if first_keys:
        shares = torch.zeros_like(answers["max_score"])
        for first, entries in first_keys.items():
            shares = torch.where(entries, answers["column", first], shares)
        answers["first_token"] = shares
    numbers = {
        name: (answers[name], counts)
        for name in (*_OF_ROWS, "first_token")
        if name in statistics and not (source is None and name in ("max_score", "logsumexp"))
    }
    for name in distances:
        shares = sum(texts.at_rows(answers[offset], offset) for offset in _DISTANCES[name])
        has_key = texts.have_previous if name == "previous_token" else counts
        numbers[name] = cast(Tensor, shares), counts & has_key
    if source is not None and "query_norm" in statistics:
        numbers["query_norm"] = texts.by_head(_norms(source, source.query)), counts
    if source is not None and "key_norm" in statistics:
        norms = _norms(source, source.key)
        norms = norms if norms.ndim == 1 else norms.repeat_interleave(source.group, -2)
        numbers["key_norm"] = texts.by_head(norms), texts.keys
    return Samples.of(numbers) if numbers else None


def _norms(source: QueryKeyScores, vectors: Tensor) -> Tensor:
    """Return the norms of queries or keys whose product is divided by sqrt(head_dim).

    Layers and kernels may scale query and key before their product, or the product itself.
    """
    factor = (abs(source.scale) * vectors.shape[-1] ** 0.5) ** 0.5
    norms = cast(Tensor, torch.linalg.vector_norm(vectors.float(), dim=-1))
    return factor * norms


class _Texts:
    """The texts of a batch: which queries and keys are no padding.

    Attributes:
        start: the position of the first recorded query.
        queries: True for queries that are no padding, (entries, 1, q_len).
        have_previous: True for queries with a token before them, (entries, 1, q_len).
        keys: True for keys that are no padding, (entries, 1, kv_len).
        first_keys: the positions of first keys; True for texts that start there, (entries, 1, 1).
    """

    def __init__(self, layer: Layer) -> None:
        matrix, positions = layer.whole(), layer.positions
        shape, device = matrix.shape, matrix.device
        self.start = positions.start
        self._entries, self._num_heads = prod(shape[:-3]), shape[-3] if len(shape) > 2 else 1
        texts = torch.tensor([(each.start, each.stop) for each in layer.texts], device=device)
        # Axes between batch and heads, such as those of windows in an image, share the text.
        texts = texts.repeat_interleave(self._entries // len(texts), 0)
        first, stop = texts[:, :1], texts[:, 1:]
        rows = torch.arange(positions.start, positions.stop, device=device)
        keys = torch.arange(shape[-1], device=device)
        inside = (rows >= first) & (rows < stop)
        self.queries = (inside if layer.reads_itself else torch.ones_like(inside))[:, None]
        self.have_previous = (rows > first)[:, None]
        self.keys = ((keys >= first) & (keys < stop))[:, None]
        firsts = {each.start for each in layer.texts if each.start < shape[-1]}
        self.first_keys = {key: (first == key)[:, None] for key in sorted(firsts)}
        self._shape = shape

    def by_head(self, answer: Tensor) -> Tensor:
        """Return an answer with one number for each row as (entries, num_heads, n)."""
        rows = answer.squeeze(-1) if answer.ndim == len(self._shape) else answer
        return rows.reshape(self._entries, self._num_heads, rows.shape[-1])

    def at_rows(self, diagonal: Tensor, offset: int) -> Tensor:
        """Return a diagonal with one number for each row; 0 where no key is so far away."""
        q_len = self._shape[-2]
        before = min(max(0, -self.start - offset), q_len)
        after = q_len - before - diagonal.shape[-1]
        return pad(diagonal, (before, after))
