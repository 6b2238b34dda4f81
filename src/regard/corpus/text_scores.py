"""Scores of every head on a batch of texts of equal length: one reduction, one answer."""

from collections.abc import Callable, Sequence
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
        self._known: dict[tuple[int, ...], Tensor] = {}

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
        batch, rows = block.box.leading[0], block.box.rows
        weights = block.weights  # (batch, num_heads, rows, columns)
        relations = self._relations(block).to(weights.dtype)
        means = weights.flatten(2) @ relations  # (batch, num_heads, relations)
        entr = cast(Callable[[Tensor], Tensor], torch.special.entr)
        entropies = entr(weights).sum(-1)  # (batch, num_heads, rows)
        share = self._mean[batch, None, rows].to(weights.dtype)
        entropy = (share * entropies).sum(-1, keepdim=True)
        return (
            Contribution(block.box.leading, torch.cat([entropy, means], -1)),
            Contribution((*block.box.leading, block.box.columns), weights.sum(-2)),
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

    def _relations(self, block: Block) -> Tensor:
        """Return the factor of each weight in each mean, (batch, rows * columns, relations)."""
        batch, rows, columns = block.box.leading[0], block.box.rows, block.box.columns
        place = (*_ends(batch), *_ends(rows), *_ends(columns))
        if place in self._known:  # from another head or layer
            return self._known[place]
        ids = self._ids[batch]
        query = torch.arange(rows.start, rows.stop, device=ids.device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=ids.device)
        own = ids[:, rows, None]
        same = own == ids[:, None, columns]
        after = (
            own == ids.roll(1, 1)[:, None, columns]
        )  # the key's predecessor is the query's token
        earlier, everywhere = key < query, torch.ones_like(same)
        kinds = (
            *(key == query - 1, key == query + 1, key == query, key == 0),
            self._separators[batch, None, columns],
            after & earlier & (key > 0),
            same & earlier,
            (query - key).abs(),
            *self._parts[:, batch, None, columns],
        )
        factors = torch.stack([kind * everywhere for kind in kinds], -1).float()
        factors *= self._shares[batch, rows, None]
        factors = factors.flatten(1, 2)
        if self._ids.numel() * self._ids.shape[1] <= WEIGHTS_AT_ONCE:
            self._known[place] = factors
        return factors


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
