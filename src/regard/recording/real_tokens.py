"""The keys of a matrix that are text; a key that no query may attend to is padding."""

from collections.abc import Iterator
from math import prod
from typing import cast

import torch
from torch import Tensor

from regard.masks import And, Drop, Keep, Mask, Or, Padding
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.box import Box, broadcast_index
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import MASKED_SCORE

__all__ = ["texts_of"]

_AT_ONCE = 2**22


def texts_of(matrix: AttentionMatrix, *, rows: range | None = None) -> tuple[range, ...]:
    """From the first key that a query may attend to, to the last: one range for each text.

    One for each entry of the first axis where there is a batch, else one. A text of which nothing
    is seen is the whole.

    Args:
        matrix: whose mask, and numbers added to its scores, are looked at; no weight is computed.
        rows: where the rows stand among the keys; empty: they are of another text; None: they are
            the whole text. A key that stands where a row does is padding if no row sees it. Of
            the others a window hides what is no padding: what is said of keys alone counts there.

    Example:
        >>> import torch, regard
        >>> from regard.recording.real_tokens import texts_of
        >>> x = torch.zeros(2, 1, 4, 1)
        >>> real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()[:, None, None]
        >>> texts_of(regard.attend(x, x, mask=regard.Causal() & regard.Keep(real)))
        (range(0, 4), range(2, 4))
    """
    kv_len, mask, added = matrix.shape[-1], matrix.mask, _added(matrix)
    rows = range(kv_len) if rows is None else rows
    of_keys = None if mask is None else _of_keys(mask)
    seen = _seen(matrix, of_keys, added if added is None or 1 in added.shape[-2:] else None)
    if rows:
        here = slice(rows.start, rows.stop)
        seen[:, here] = _seen(matrix, mask, added)[:, here]
    return tuple(_extent(row, kv_len) for row in seen.cpu())


def _seen(matrix: AttentionMatrix, mask: Mask | None, added: Tensor | None) -> Tensor:
    """Return which keys some query sees under a mask and a bias, (entries, kv_len)."""
    shape, kv_len = matrix.shape, matrix.shape[-1]
    entries = shape[0] if len(shape) > 3 else 1
    seen = torch.zeros(entries, kv_len, dtype=torch.bool, device=matrix.device)
    if added is None and (mask is None or _shows_both_ends(mask, shape)):
        return ~seen
    for box in _boxes(shape):
        shown = torch.ones((), dtype=torch.bool, device=matrix.device)
        if mask is not None:
            shown = shown & mask.block(box, shape, matrix.device)
        if added is not None:
            shown = shown & ~(broadcast_index(added, box.at_both) <= MASKED_SCORE)
        shown = shown[(None,) * (len(shape) - shown.ndim)]  # every axis, full or 1
        by_key = shown.flatten(1, -2).any(1) if len(shape) > 3 else shown.flatten(0, -2).any(0)
        seen |= by_key
    return seen


def _added(matrix: AttentionMatrix) -> Tensor | None:
    """Return the numbers that may mask by being low; None if there are none."""
    match matrix.source:
        case QueryKeyScores(bias=bias):
            return bias
        case GivenScores(values, are_weights=False):
            return values
        case _:  # a weight of 0 can be one that nothing forbids
            return None


def _of_keys(mask: Mask) -> Mask | None:
    """Return the part of a mask that depends on keys or queries alone; None if there is none."""
    match mask:
        case And(first, second):
            parts = [part for part in (_of_keys(first), _of_keys(second)) if part is not None]
            return And(*parts) if len(parts) == 2 else next(iter(parts), None)
        case Or(first, second):
            one, other = _of_keys(first), _of_keys(second)
            return None if one is None or other is None else Or(one, other)
        case Keep(tensor) | Drop(tensor):
            return mask if 1 in tensor.shape[-2:] else None
        case Padding():
            return mask
        case _:
            return None


def _shows_both_ends(mask: Mask, shape: torch.Size) -> bool:
    """Return whether the first and last query are known to see the first and last key."""
    leading = tuple(slice(0, n) for n in shape[:-2])
    ends = (slice(0, 1), slice(shape[-2] - 1, shape[-2]))
    every = [mask.key_bounds(leading, rows, shape).all for rows in ends]
    whole = [part for part in every if part.start < part.stop]
    return any(part.start == 0 for part in whole) and any(part.stop == shape[-1] for part in whole)


def _boxes(shape: torch.Size) -> Iterator[Box]:
    """Yield the whole matrix in boxes of some rows."""
    leading = tuple(slice(0, n) for n in shape[:-2])
    height = max(1, _AT_ONCE // (prod(shape[:-2]) * shape[-1]))
    for start in range(0, shape[-2], height):
        rows = slice(start, min(start + height, shape[-2]))
        yield Box(leading, rows, slice(0, shape[-1]))


def _extent(seen: Tensor, kv_len: int) -> range:
    """From the first True to the last."""
    places = cast("list[int]", seen.nonzero().flatten().tolist())
    return range(places[0], places[-1] + 1) if places else range(kv_len)
