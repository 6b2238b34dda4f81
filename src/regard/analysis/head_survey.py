"""Scores of heads on one text: mean weights over the queries, without special tokens and padding.

The scores follow Clark et al. 2019, "What Does BERT Look At?", section 3, and Voita et al. 2019,
"Analyzing Multi-Head Self-Attention", section 5.1, with one change. All scores omit special tokens,
the first token and padding as queries. The neighbour scores also omit them as keys, so that a sink
never counts as a neighbour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.analysis.head_kinds import FIRST, LOCAL, NEXT, PREVIOUS, SELF, SEPARATOR, UNIFORM
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import NormalizedEntropy
from regard.reductions.sums import Diagonal, Segments

_Value = TypeVar("_Value")
# Local attention is within 4 tokens to either side, for queries with at least 20 tokens before.
_NEAR = 4
_FROM = 5 * _NEAR


@dataclass(frozen=True)
class Survey:
    """The reductions that classify the heads of a layer, and the scores from their answers.

    ``regard.heads(seen)`` needs only its ``reductions``, recorded by ``observe(model, keep=...)``.

    Attributes:
        queries: for each query, True if it is a special token.
        keys: for each key, True if it is a special token; None if keys and queries are the same.
        start: the position of the first recorded query among the keys; None if all queries were
            recorded, or the keys are another text.
        texts: the range of the keys without padding for each batch entry, as found by
            ``regard.recording.real_tokens``. One range counts for all entries; an empty tuple
            means all keys.
    """

    queries: tuple[bool, ...]
    keys: tuple[bool, ...] | None = None
    start: int | None = None
    texts: tuple[range, ...] = ()

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions; those that need positions are omitted if the keys are another text."""
        to_keys = Segments(list(self._query_spans), list(self._key_spans))
        near = range(self._first - _NEAR, self._first + _NEAR + 1) if self._one_text else ()
        return (NormalizedEntropy(), to_keys, *(Diagonal(offset) for offset in near))

    def scores(self, answers: Sequence[Any]) -> dict[str, Tensor]:
        """Return the scores of all heads, (..., num_heads), by the names of the kinds.

        If batch entries have different padding, the scores of those that have a score are
        concatenated along the first axis.
        """
        if len(self._texts) == 1:
            return self._scores_of(0, answers)
        entries = [
            self._scores_of(entry, [answer[entry : entry + 1] for answer in answers])
            for entry in range(len(self._texts))
        ]
        names = dict.fromkeys(name for scores in entries for name in scores)
        return {
            name: torch.cat([scores[name] for scores in entries if name in scores])
            for name in names
        }

    def _scores_of(self, entry: int, answers: Sequence[Any]) -> dict[str, Tensor]:
        spread, segments, *diagonals = answers
        text, queries = self._texts[entry]
        lengths = [
            (stop - start) * (entry in entries)
            for (start, stop), entries in self._query_spans.items()
        ]
        shares = torch.einsum("q,...qk->...k", segments.new_tensor(lengths), segments)
        shares = shares / len(queries)
        roles = [of_texts[entry] for of_texts in self._key_spans.values()]
        named = {
            name: shares[..., [index for index, role in enumerate(roles) if role == name]].sum(-1)
            for name in (FIRST.name, SEPARATOR.name)
        }
        named[UNIFORM.name] = _mean(spread, queries)
        if self._one_text:
            named |= self._near_scores(text, queries, diagonals)
        return named

    def _near_scores(
        self, text: range, queries: list[int], diagonals: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the scores that depend on positions."""
        near, first = range(-_NEAR, _NEAR + 1), self._first
        neighbours = {key for key in text[1:] if not self._special[key]}
        at = {
            n: _at(first + n, diagonal, len(self.queries))
            for n, diagonal in zip(near, diagonals, strict=True)
        }
        named = {
            PREVIOUS.name: _mean(at[-1], [q for q in queries if first + q - 1 in neighbours]),
            NEXT.name: _mean(at[1], [q for q in queries if first + q + 1 in neighbours]),
            SELF.name: _mean(at[0], queries),
        }
        far = [q for q in queries if first + q - text.start >= _FROM]
        if far:
            named[LOCAL.name] = _mean(torch.stack(list(at.values())).sum(0), far)
        return named

    @property
    def _one_text(self) -> bool:
        return self.keys is None or self.start is not None

    @property
    def _first(self) -> int:
        """The position of the first query."""
        return self.start or 0

    @property
    def _special(self) -> tuple[bool, ...]:
        """True for each key that is a special token."""
        return self.queries if self.keys is None else self.keys

    @cached_property
    def _texts(self) -> tuple[tuple[range, list[int]], ...]:
        """Each text with the queries that count: its ordinary tokens, or all if it has none."""
        texts = self.texts or (range(len(self._special)),)
        if len(set(texts)) == 1:
            texts = texts[:1]
        return tuple((text, self._counted_queries(text)) for text in texts)

    def _counted_queries(self, text: range) -> list[int]:
        everyone = range(len(self.queries))
        # If the keys are another text, their padding does not apply to the queries.
        positions = text if self._one_text else everyone
        inside = [query for query in everyone if self._first + query in positions]
        words = [
            query
            for query in inside
            if self._first + query > positions.start and not self.queries[query]
        ]
        return words or inside or list(everyone)

    @cached_property
    def _query_spans(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Spans of queries that count, each with the indices of the texts in which it counts."""
        sets = [set(queries) for _, queries in self._texts]
        entries = [
            tuple(entry for entry, queries in enumerate(sets) if query in queries)
            for query in range(len(self.queries))
        ]
        return {span: of for span, of in _runs(entries).items() if of}

    @cached_property
    def _key_spans(self) -> dict[tuple[int, int], tuple[str | None, ...]]:
        """Spans of first and special keys, each with its kind of sink in each text."""
        roles = [
            tuple(self._role(key, text) for text, _ in self._texts)
            for key in range(len(self._special))
        ]
        return {span: of for span, of in _runs(roles).items() if any(of)}

    def _role(self, key: int, text: range) -> str | None:
        if key == text.start:
            return FIRST.name
        return SEPARATOR.name if key in text and self._special[key] else None


def of_each_head(scores: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return scores (..., num_heads) as lists: the mean over all leading axes for each head.

    A score without an axis of heads becomes a list of one number.
    """
    return {
        name: torch.atleast_2d(values).flatten(0, -2).double().mean(0).tolist()
        for name, values in scores.items()
    }


def _at(offset: int, diagonal: Tensor, q_len: int) -> Tensor:
    """Pad a diagonal to the weights A[i, i + offset] of all queries i; 0 if the key is missing."""
    before = min(max(0, -offset), q_len)
    after = q_len - before - diagonal.shape[-1]
    return torch.nn.functional.pad(diagonal, (before, after))


def _mean(values: Tensor, indices: list[int]) -> Tensor:
    """Return the mean of the values at these indices; 0 if there are none."""
    return values[..., indices].mean(-1) if indices else values.new_zeros(values.shape[:-1])


def _runs(values: Sequence[_Value]) -> dict[tuple[int, int], _Value]:
    """Return the spans (start, stop) of equal neighbours, each with its value."""
    spans: dict[tuple[int, int], _Value] = {}
    start = 0
    for value, group in groupby(values):
        stop = start + len(list(group))
        spans[start, stop] = value
        start = stop
    return spans
