"""Grouped-query heads: several query heads share one key head (Ainslie et al. 2023, GQA).

Query head h uses key head ``h // group`` with ``group = num_heads // num_kv_heads``. A key head is
copied only if a part of the matrix contains a part of its group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.scores.box import Index


def group_size(leading: torch.Size, kv_tensor: Tensor) -> int:
    """Return the number of query heads for each head of kv_tensor; leading is (..., num_heads)."""
    return leading[-1] // kv_tensor.shape[-3] if leading else 1


def kv_leading(leading: tuple[slice, ...], group: int) -> tuple[slice, ...]:
    """Return the slices of batch and key heads that the query heads of a box use."""
    if group == 1:
        return leading
    heads = leading[-1]
    return (*leading[:-1], slice(heads.start // group, (heads.stop - 1) // group + 1))


def grouped_matmul(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute left @ right, where left has a multiple of the heads of right.

    (..., num_heads, rows, d) @ (..., num_kv_heads, d, columns) -> (..., num_heads, rows, columns).
    """
    if min(left.ndim, right.ndim) == 2 or left.shape[-3] == right.shape[-3]:
        return torch.matmul(left, right, out=out)
    *batch, heads, rows, _ = left.shape
    kv_heads, columns = right.shape[-3], right.shape[-1]
    packed = left.reshape(*batch, kv_heads, heads // kv_heads * rows, left.shape[-1])
    if out is not None:
        out = out.view(*batch, kv_heads, heads // kv_heads * rows, columns)
    return torch.matmul(packed, right, out=out).view(*batch, heads, rows, columns)


def select_kv(tensor: Tensor, index: Index, num_heads: int) -> Tensor:
    """Return the key heads (..., num_kv_heads, kv_len, dim) that ``A[index]`` needs.

    A slice with a part of a group copies the key heads that it needs. Other indices give a view.
    """
    if not index:
        return tensor
    group = num_heads // tensor.shape[-3]
    *batch, heads = index
    if isinstance(heads, int):
        return tensor[(*batch, heads // group)]
    chosen = range(num_heads)[heads]
    if group == 1:
        return tensor[(*batch, heads)]
    if chosen.step == 1 and chosen.start % group == 0 and len(chosen) % group == 0:
        return tensor[(*batch, slice(chosen.start // group, chosen.stop // group))]
    return repeat_heads(tensor[tuple(batch)], [head // group for head in chosen])


def repeat_heads(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Return these heads of (..., num_heads, tokens, dim); a head may occur several times.

    The gradient sums the copies of a head in a fixed order. The gradient of ``index_select`` has no
    fixed order on a GPU.
    """
    each = tensor.unbind(-3)
    return torch.stack([each[head] for head in heads], -3)
