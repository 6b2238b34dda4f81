"""Scores of every head on a batch of texts of equal length: one reduction, one answer."""

from collections.abc import Sequence
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction

WEIGHTS_AT_ONCE = 2**20
"""A batch of several texts has at most this many weights in each head."""

_RELATIONS = (
    *("previous", "next", "self", "first_token", "separators"),
    *("induction", "duplicate", "distance"),
)
_OFFSETS = (-1, 1, 0)  # of the keys of the first three relations, from the query
_RECEIVED = ("received", "received_at")
SCORES = ("entropy", *_RELATIONS, *_RECEIVED)
"""The names of the scores; ``docs/survey.md`` defines each."""


@final
class TextScores(Reduction):
    """Scores of every head on each text; ``docs/survey.md`` defines them.

    Most are means over the words of a text: its queries without special tokens and without the
    first token. All queries count in a text without words.

    Args:
        ids: the token ids of each text, (batch, tokens).
        special: True for special tokens, (batch, tokens).
        parts: for each chosen part, True for its tokens, (parts, batch, tokens).

    Example:
        >>> import torch, regard
        >>> from regard.corpus.text_scores import TextScores
        >>> ids = torch.tensor([[7, 8, 7, 8]])
        >>> x = torch.zeros(1, 1, 4, 1)
        >>> scores = TextScores(ids, torch.zeros(1, 4).bool(), torch.zeros(0, 1, 4).bool())
        >>> named = scores.columns(regard.attend(x, x).reduce(scores), ())
        >>> named["previous"], named["received"]
        ([[0.25]], [[0.25]])
    """

    def __init__(self, ids: Tensor, special: Tensor, parts: Tensor) -> None:
        self._ids, self._parts = ids, parts
        self._separators = special.clone()
        self._separators[:, 0] = False
        words = ~special
        words[:, 0] = False
        asking = words.clone()
        asking[~asking.any(-1)] = True
        counted = _counted(ids, words, parts) & asking[..., None]  # (batch, tokens, relations)
        self._counts = counted.sum(1)  # (batch, relations)
        self._shares = counted / self._counts.clamp(min=1)[:, None]
        self._mean = asking / asking.sum(-1, keepdim=True)  # (batch, tokens)
        self._known: dict[tuple[int, ...], _Factors] = {}

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        batch, length = self._ids.shape
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, length, length):
            raise ValueError(
                f"the matrix has shape {tuple(shape)}; a survey of {batch} texts of {length} "
                f"tokens needs ({batch}, num_heads, {length}, {length}).\n"
                "    Choose a model in which each text attends to itself alone."
            )
        scores = 1 + self._shares.shape[-1]
        return (
            torch.zeros(*shape[:2], scores, dtype=dtype, device=device),
            torch.zeros(*shape[:2], length, dtype=dtype, device=device),
        )

    def update(self, block: Block) -> tuple[Contribution, ...]:
        weights = block.weights  # (batch, num_heads, rows, columns)
        known = self._factors(block)
        # The entropy of a row is lse - sum(weights * scores); its largest weight is exp(max - lse).
        smallest = torch.finfo(weights.dtype).tiny
        normalizer = -weights.amax(-1).clamp(min=smallest).log()
        entropies = normalizer * weights.sum(-1) - block.mean_shifted
        distances = (weights * known.distances).sum(-1)  # (batch, num_heads, rows)
        mean = known.rows[..., 1, :]
        received, averages = (known.rows @ weights).unbind(-2)
        first_token, separators, *parts = (averages @ known.kinds).unbind(-1)
        diagonals = [
            (block.diagonal(offset) * shares).sum(-1)
            for offset, shares in zip(_OFFSETS, known.diagonals, strict=True)
        ]
        place, entry, query, key, share = known.pairs
        pairs = weights.new_zeros(2 * weights.shape[0], weights.shape[1])
        pairs = pairs.index_add_(0, place, weights[entry, :, query, key] * share)
        means = [
            *((entropies * mean).sum(-1), *diagonals, first_token, separators),
            *(*pairs.chunk(2), (distances * mean).sum(-1), *parts),
        ]
        return (
            Contribution(block.box.leading, torch.stack(means, -1)),
            Contribution((*block.box.leading, block.box.columns), received),
        )

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        means, received = buffers
        largest, place = (received / shape[-2]).max(-1, keepdim=True)
        return torch.cat([means, largest, place.to(means.dtype)], -1)

    def columns(self, answer: Tensor, parts: Sequence[str]) -> dict[str, list[list[float | None]]]:
        """Return each score of each text and head, by its name; None if no query has the score.

        Args:
            answer: to this reduction, (batch, num_heads, scores).
            parts: the names of the chosen parts.
        """
        relations = (*_RELATIONS, *parts)
        absent = cast(list[list[bool]], (self._counts == 0).tolist())  # (batch, relations)
        names = ("entropy", *relations, *_RECEIVED)
        named: dict[str, list[list[float | None]]] = {}
        for name, values in zip(names, answer.unbind(-1), strict=True):
            named[name] = values.tolist()
            if name in relations:
                for text, missing in enumerate(absent):
                    if missing[relations.index(name)]:
                        named[name][text] = [None] * values.shape[1]
        return named

    def _factors(self, block: Block) -> "_Factors":
        """Return the factors of the weights of a block."""
        batch, rows, columns = block.box.leading[0], block.box.rows, block.box.columns
        place = (*_ends(batch), *_ends(rows), *_ends(columns))
        known = self._known.get(place)  # from another head or layer
        if known is not None:
            return known
        dtype, device = block.weights.dtype, self._ids.device
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=device)
        mean = self._mean[batch, rows]
        first = (key == 0).expand(mean.shape[0], -1)
        kinds = [first, self._separators[batch, columns], *self._parts[:, batch, columns]]
        diagonals: list[Tensor] = []
        for relation, offset in enumerate(_OFFSETS):
            start = max(rows.start, columns.start - offset)
            stop = max(start, min(rows.stop, columns.stop - offset))
            diagonals.append(self._shares[batch, None, start:stop, relation].to(dtype))
        known = _Factors(
            torch.stack([torch.ones_like(mean), mean], 1)[:, None].to(dtype),
            (query - key).abs().to(dtype),
            torch.stack(kinds, -1).to(dtype),
            tuple(diagonals),
            self._pairs(batch, rows, query, key, dtype),
        )
        if self._ids.numel() * self._ids.shape[1] <= WEIGHTS_AT_ONCE:
            self._known[place] = known
        return known

    def _pairs(
        self, batch: slice, rows: slice, query: Tensor, key: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return place, entry, row, column and share of each pair of tokens that are alike.

        The places of induction come before those of duplicates.
        """
        ids = self._ids[batch]
        found: list[tuple[Tensor, ...]] = []
        # Induction: the token before the key is the query's token. Duplicate: the key itself is.
        kinds = (("induction", ids.roll(1, 1), key > 0), ("duplicate", ids, key >= 0))
        for number, (name, of_keys, allowed) in enumerate(kinds):
            same = ids[:, rows, None] == of_keys[:, None, key]
            entry, row, column = (same & (key < query) & allowed).nonzero().unbind(-1)
            share = self._shares[batch, rows, _RELATIONS.index(name)][entry, row, None]
            found.append((entry + number * ids.shape[0], entry, row, column, share.to(dtype)))
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


class _Factors(NamedTuple):
    """The factors of the weights of one block in the scores.

    Attributes:
        rows: ones, and the share of each row in a mean over words, (batch, 1, 2, rows).
        distances: between query and key, (rows, columns).
        kinds: 1 for the first token, separators and tokens of parts, (batch, columns, kinds).
        diagonals: for each of ``_OFFSETS``, the shares of its rows, (batch, 1, rows).
        pairs: place in the sums, entry, row, column and share of pairs of tokens that are alike.
    """

    rows: Tensor
    distances: Tensor
    kinds: Tensor
    diagonals: tuple[Tensor, ...]
    pairs: tuple[Tensor, ...]


def _counted(ids: Tensor, words: Tensor, parts: Tensor) -> Tensor:
    """Return True for the queries of each relation's mean, (batch, tokens, relations)."""
    rows = cast(list[list[int]], ids.tolist())
    first = torch.tensor([_first_places(row) for row in rows], device=ids.device)
    place, everyone = torch.arange(ids.shape[1], device=ids.device), torch.ones_like(words)
    before, after = words.roll(1, 1), words.roll(-1, 1)
    before[:, 0] = after[:, -1] = False
    return torch.stack(
        [
            *(before, after, everyone, everyone, everyone),
            # The key after the earlier token must come before the query, too.
            *(first < place - 1, first < place, everyone),
            *(part.any(-1, keepdim=True).expand_as(words) for part in parts),
        ],
        -1,
    )


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _first_places(ids: list[int]) -> list[int]:
    """Return for each token where the same token comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(token, place) for place, token in enumerate(ids)]
