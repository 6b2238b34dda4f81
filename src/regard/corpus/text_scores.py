"""Scores of every head on a batch of texts of equal length: one reduction, one answer."""

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor

from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction

__all__ = ["SCORES", "WEIGHTS_AT_ONCE", "TextScores"]

WEIGHTS_AT_ONCE = 2**20
"""A batch of several texts has at most this many weights in each head."""

_RELATIONS = (
    *("previous", "next", "self", "first_token", "separators"),
    *("induction", "duplicate", "distance"),
)
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
        self._known: dict[tuple[str | int, ...], tuple[Tensor, ...]] = {}

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
        batch, rows, columns = block.box.leading[0], block.box.rows, block.box.columns
        weights = block.weights  # (batch, num_heads, rows, columns)
        mean = self._mean[batch, rows].to(weights.dtype)  # (batch, rows)
        # The entropy of a row is lse - sum(weights * scores); its largest weight is exp(max - lse).
        smallest = torch.finfo(weights.dtype).tiny
        normalizer = -weights.amax(-1).clamp(min=smallest).log()
        entropies = normalizer * weights.sum(-1) - block.mean_shifted
        query, key = _places(rows, weights)[:, None], _places(columns, weights)
        distances = (weights * (query - key).abs()).sum(-1)  # (batch, num_heads, rows)
        entropy, distance = ((each * mean[:, None]).sum(-1) for each in (entropies, distances))
        factors = torch.stack([torch.ones_like(mean), mean], 1)  # (batch, 2, rows)
        received, averages = (factors[:, None] @ weights).unbind(-2)
        first = (key == 0).expand(mean.shape[0], -1)  # (batch, columns)
        kinds = [first, self._separators[batch, columns], *self._parts[:, batch, columns]]
        shares = averages @ torch.stack(kinds, -1).to(weights.dtype)
        diagonals = [self._diagonal(block, offset) for offset in (-1, 1, 0)]
        pairs = [self._pairs(block, name) for name in ("induction", "duplicate")]
        first_token, separators, *parts = shares.unbind(-1)
        means = [*diagonals, first_token, separators, *pairs, distance, *parts]
        return (
            Contribution(block.box.leading, torch.stack([entropy, *means], -1)),
            Contribution((*block.box.leading, columns), received),
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

    def _diagonal(self, block: Block, offset: int) -> Tensor:
        """Return the mean weight on the key ``offset`` after the query, (batch, num_heads)."""
        rows, columns = block.box.rows, block.box.columns
        start = max(rows.start, columns.start - offset)
        stop = max(start, min(rows.stop, columns.stop - offset))
        relation = _RELATIONS.index({-1: "previous", 1: "next", 0: "self"}[offset])
        shares = self._shares[block.box.leading[0], start:stop, relation]
        weights = block.diagonal(offset)
        return (weights * shares[:, None].to(weights.dtype)).sum(-1)

    def _pairs(self, block: Block, name: str) -> Tensor:
        """Return the mean weight on the keys of a sparse relation, (batch, num_heads)."""
        batch, rows, columns = block.box.leading[0], block.box.rows, block.box.columns
        place = (name, *_ends(batch), *_ends(rows), *_ends(columns))
        found = self._known.get(place)  # from another head or layer
        if found is None:
            found = self._found(batch, rows, columns, name)
            if self._ids.numel() * self._ids.shape[1] <= WEIGHTS_AT_ONCE:
                self._known[place] = found
        entry, query, key, share = found
        weights = block.weights
        shares = weights[entry, :, query, key] * share[:, None].to(weights.dtype)
        return weights.new_zeros(weights.shape[:2]).index_add_(0, entry, shares)

    def _found(self, batch: slice, rows: slice, columns: slice, name: str) -> tuple[Tensor, ...]:
        """Return entry, row, column and share of each pair of a sparse relation, (pairs,) each."""
        # Induction: the token before the key is the query's token. Duplicate: the key itself is.
        ids = self._ids[batch]
        of_keys = ids.roll(1, 1) if name == "induction" else ids
        query = torch.arange(rows.start, rows.stop, device=ids.device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=ids.device)
        same = ids[:, rows, None] == of_keys[:, None, columns]
        earlier = (key < query) & ((key > 0) | (name == "duplicate"))
        entry, row, column = (same & earlier).nonzero().unbind(-1)
        share = self._shares[batch, rows, _RELATIONS.index(name)][entry, row]
        return entry, row, column, share


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


def _places(part: slice, like: Tensor) -> Tensor:
    """Return the positions of a slice, (length,), with the dtype and device of a tensor."""
    return torch.arange(part.start, part.stop, dtype=like.dtype, device=like.device)


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _first_places(ids: list[int]) -> list[int]:
    """Return for each token where the same token comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(token, place) for place, token in enumerate(ids)]
