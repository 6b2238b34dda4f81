"""Masks as the page reads them: for each row one interval of allowed keys."""

import torch
from torch import Tensor

from regard.indexing import Box
from regard.masks import Mask
from regard.matrix import AttentionMatrix

__all__ = ["IRREGULAR", "intervals"]

IRREGULAR = "the allowed keys of a row are more than one interval"


def intervals(matrix: AttentionMatrix) -> Tensor | str | None:
    """For each row the first allowed key and the one past the last, (1 or num_heads, q_len, 2).

    None where every key is allowed; ``IRREGULAR`` where a row's keys are no single interval.

    Args:
        matrix: (num_heads, q_len, kv_len).

    Example:
        >>> import torch, regard
        >>> from regard.see.intervals import intervals
        >>> A = regard.attend(torch.ones(1, 3, 2), torch.ones(1, 3, 2), mask=regard.Causal())
        >>> intervals(A).tolist()
        [[[0, 1], [0, 2], [0, 3]]]
    """
    if matrix.mask is None:
        return None
    kv_len = matrix.shape[-1]
    found: list[Tensor] = []
    rows = max(1, 2**24 // (kv_len * matrix.shape[0]))
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
    kv_len = matrix.shape[-1]
    box = Box((slice(0, matrix.shape[0]),), rows, slice(0, kv_len))
    block = mask.block(box, matrix.shape, matrix.device)
    heads = block.shape[0] if block.ndim == 3 else 1
    allowed = block.expand(heads, rows.stop - rows.start, kv_len).to(torch.uint8)
    count = allowed.sum(-1)
    first = allowed.argmax(-1)
    end = kv_len - allowed.flip(-1).argmax(-1)
    if bool(((count > 0) & (end - first != count)).any()):
        return None
    return torch.stack((first, torch.where(count > 0, end, first)), dim=-1)
