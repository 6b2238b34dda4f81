"""Masks as the page reads them: for each row one interval of allowed keys."""

import torch
from torch import Tensor

from regard.masks import Mask
from regard.masks.mask import length
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.box import Box

IRREGULAR = "the allowed keys of a row are more than one interval"


def intervals(matrix: AttentionMatrix) -> Tensor | str | None:
    """For each row the first allowed key and the one past the last, (1 or num_heads, q_len, 2).

    None where every key is allowed; ``IRREGULAR`` where a row's keys are no single interval.

    Args:
        matrix: (num_heads, q_len, kv_len).

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.mask_intervals import intervals
        >>> A = regard.attend(torch.ones(1, 3, 2), torch.ones(1, 3, 2), mask=regard.Causal())
        >>> intervals(A).tolist()
        [[[0, 1], [0, 2], [0, 3]]]
    """
    if matrix.mask is None:
        return None
    kv_len = matrix.shape[-1]
    found: list[Tensor] = []
    # Nearly all keys are allowed to all of a few rows or to none, and need no look.
    rows = max(1, min(64, 2**24 // (kv_len * matrix.shape[0])))
    for start in range(0, matrix.shape[-2], rows):
        part = slice(start, min(start + rows, matrix.shape[-2]))
        spans = _row_spans(matrix.mask, matrix, part)
        if spans is None:
            return IRREGULAR
        found.append(spans)
    heads = max(spans.shape[0] for spans in found)
    joined = torch.cat([spans.expand(heads, -1, -1) for spans in found], dim=1).int()
    if bool((joined == joined[:1]).all()):
        joined = joined[:1]
    everything = torch.tensor([0, kv_len], device=joined.device)
    return None if bool((joined == everything).all()) else joined


def _row_spans(mask: Mask, matrix: AttentionMatrix, rows: slice) -> Tensor | None:
    """(1 or num_heads, rows, 2); None where a row's keys are no single interval."""
    some, every = mask.key_bounds((slice(0, matrix.shape[0]),), rows, matrix.shape)
    if not length(some):
        return torch.zeros(1, length(rows), 2, dtype=torch.long, device=matrix.device)
    # Of the keys that all of these rows may attend to, the first and the last are looked at.
    inner = slice(every.start + 1, max(every.start + 1, every.stop - 1))
    if not length(every):
        inner = slice(some.start, some.start)
    parts = (slice(some.start, inner.start), slice(inner.stop, some.stop))
    allowed = torch.cat([_allowed(mask, matrix, rows, part) for part in parts], -1)
    keys = torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts]).to(
        matrix.device
    )
    count = allowed.sum(-1)
    first = keys[allowed.argmax(-1)]
    last = keys[allowed.shape[-1] - 1 - allowed.flip(-1).argmax(-1)]
    whole = count + length(inner) * (count > 0)
    if bool(((count > 0) & (last + 1 - first != whole)).any()):
        return None
    return torch.stack((first, torch.where(count > 0, last + 1, first)), dim=-1)


def _allowed(mask: Mask, matrix: AttentionMatrix, rows: slice, keys: slice) -> Tensor:
    """Return True where a query may attend to a key, (1 or num_heads, rows, keys)."""
    box = Box((slice(0, matrix.shape[0]),), rows, keys)
    block = mask.block(box, matrix.shape, matrix.device)
    heads = block.shape[0] if block.ndim == 3 else 1
    return block.expand(heads, length(rows), length(keys)).to(torch.uint8)
