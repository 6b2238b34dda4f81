"""The product of weights and an operand, in which NaN does not reach rows that mask its key."""

from collections.abc import Callable
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from regard.scores.box import Box, Index
from regard.scores.grouped_heads import grouped_matmul, kv_leading, repeat_heads
from regard.scores.score_source import reads_without_sync


class Operands(Protocol):
    """What ``operand_part`` uses of a block: its position, and ``part`` to cut operands."""

    shape: torch.Size
    box: Box

    def part(self, tensor: Tensor, index: Index) -> Tensor: ...


def masked_product(weights: Tensor, operand: Tensor, allowed: Callable[[], Tensor]) -> Tensor:
    """Return weights @ operand, where NaN and infinity do not reach rows that mask their key.

    A weight of 0 times NaN is NaN, so a plain product gives NaN in rows that mask the key. Devices
    other than the CPU return the plain product, because a check for NaN would synchronise them.

    Args:
        weights: (..., num_heads, rows, columns); 0 where a key is masked.
        operand: (..., num_kv_heads, columns, width).
        allowed: returns a bool tensor of the shape of the weights, True where a key is not masked.

    Example:
        >>> import torch
        >>> from regard.reductions.masked_product import masked_product
        >>> weights, operand = torch.eye(2), torch.tensor([[1.0], [torch.nan]])
        >>> masked_product(weights, operand, lambda: weights > 0)
        tensor([[1.],
                [nan]])
    """
    product = grouped_matmul(weights, operand)
    fewer = min(operand, product, key=Tensor.numel).detach()
    if not reads_without_sync(fewer) or isfinite(fewer.sum().item()):
        return product
    above, below, nan = operand == torch.inf, operand == -torch.inf, operand.isnan()
    product = grouped_matmul(weights, operand.masked_fill(above | below | nan, 0))
    kinds = torch.cat((above, below, nan), -1).to(weights.dtype)
    above, below, nan = (grouped_matmul(allowed().to(weights.dtype), kinds) > 0).chunk(3, -1)
    special = torch.zeros_like(product).masked_fill(above, torch.inf).masked_fill(below, -torch.inf)
    return product + special.masked_fill(nan | (above & below), torch.nan)


def operand_width(operand: Tensor) -> int:
    """Return the number of columns of an operand; 1 for a vector."""
    return 1 if operand.ndim == 1 else operand.shape[-1]


def operand_part(block: Operands, operand: Tensor, positions: slice) -> Tensor:
    """Return the rows of an operand (..., heads, tokens, dim) that a block multiplies."""
    if operand.ndim == 1:
        return block.part(operand, (positions,))[:, None]
    axes = operand.ndim - 2
    if not axes:
        return block.part(operand, (positions,))
    group = block.shape[-3] // operand.shape[-3]
    leading = kv_leading(block.box.leading, group)
    part = block.part(operand, (*leading[len(leading) - axes :], positions))
    heads = range(block.shape[-3])[block.box.leading[-1]]
    if part.shape[-3] == 1 or (heads.start % group == 0 and len(heads) % group == 0):
        return part
    # The block cuts through a group: each head in it gets a copy of its operand head.
    return repeat_heads(part, [head // group - heads.start // group for head in heads])
