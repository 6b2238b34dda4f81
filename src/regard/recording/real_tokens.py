"""Detection of padding: keys at both ends of a text that no query may attend to."""

from math import prod
from typing import cast

import torch
from torch import Tensor

from regard.masks import And, Keep, Mask, Or, Padding
from regard.masks.recognise import allowed_rows
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import MASKED_SCORE

_AT_ONCE = 2**22


def texts_of(matrix: AttentionMatrix, *, rows: range) -> tuple[range, ...]:
    """Return the range of keys without padding for each batch entry.

    A range goes from the first key that a query may attend to, to the last. Without a batch axis
    there is one range. If no query may attend to any key, the range has all keys.

    Args:
        matrix: the matrix; only its mask and its bias are read, and no weight is computed.
        rows: the positions of the rows among the keys. It is empty if queries and keys are
            different texts. A key at one of these positions is padding if no
            row may attend to it. A window may also hide real tokens, so for other keys only masks
            that depend on keys alone count.
    """
    kv_len, mask, added = matrix.shape[-1], matrix.mask, numbers_of(matrix)
    of_keys = None if mask is None else _of_keys(mask)
    seen = _seen(matrix, of_keys, added if added is None or 1 in added.shape[-2:] else None)
    if rows:
        here = slice(rows.start, rows.stop)
        seen[:, here] = _seen(matrix, mask, added)[:, here]
    return tuple(_extent(row, kv_len) for row in seen.cpu())


def _seen(matrix: AttentionMatrix, mask: Mask | None, added: Tensor | None) -> Tensor:
    """Return True for keys that a query may attend to, by mask and bias, (entries, kv_len)."""
    shape, kv_len = matrix.shape, matrix.shape[-1]
    entries = shape[0] if len(shape) > 3 else 1
    seen = torch.zeros(entries, kv_len, dtype=torch.bool, device=matrix.device)
    if added is None and (mask is None or _shows_both_ends(mask, shape)):
        return ~seen
    height = max(1, _AT_ONCE // (prod(shape[:-2]) * kv_len))
    for start in range(0, shape[-2], height):
        rows = slice(start, min(start + height, shape[-2]))
        shown = allowed_rows(mask, rows, shape, matrix.device)
        if added is not None:
            whole = added.expand(*added.shape[:-2], *shape[-2:])
            shown = shown & ~(whole[..., rows, :] <= MASKED_SCORE)
        by_key = shown.flatten(1, -2).any(1) if len(shape) > 3 else shown.flatten(0, -2).any(0)
        seen |= by_key
    return seen


def numbers_of(matrix: AttentionMatrix) -> Tensor | None:
    """Return the bias or the scores, in which very low numbers mask; None if there are none."""
    match matrix.source:
        case QueryKeyScores(bias=bias):
            return bias
        case GivenScores(values, are_weights=False):
            return values
        case _:  # a weight of 0 does not imply a mask
            return None


def _of_keys(mask: Mask) -> Mask | None:
    """Return the part of a mask that depends only on keys or only on queries; None without one."""
    match mask:
        case And(first, second):
            parts = [part for part in (_of_keys(first), _of_keys(second)) if part is not None]
            return And(*parts) if len(parts) == 2 else next(iter(parts), None)
        case Or(first, second):
            one, other = _of_keys(first), _of_keys(second)
            return None if one is None or other is None else Or(one, other)
        case Keep(tensor):
            return mask if 1 in tensor.shape[-2:] else None
        case Padding():
            return mask
        case _:
            return None


def _shows_both_ends(mask: Mask, shape: torch.Size) -> bool:
    """Return True if the mask's bounds show that the first and the last key are visible."""
    leading = tuple(slice(0, n) for n in shape[:-2])
    ends = (slice(0, 1), slice(shape[-2] - 1, shape[-2]))
    every = [mask.key_bounds(leading, rows, shape).all for rows in ends]
    visible = [part for part in every if part.start < part.stop]
    return any(part.start == 0 for part in visible) and any(
        part.stop == shape[-1] for part in visible
    )


def _extent(seen: Tensor, kv_len: int) -> range:
    """Return the range from the first True to the last; all keys if there is none."""
    columns = cast("list[int]", seen.nonzero().flatten().tolist())
    return range(columns[0], columns[-1] + 1) if columns else range(kv_len)
