"""What is one call of PyTorch's fused attention: weights @ value."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.backend import Backend
from regard.masks import Causal, Keep, Mask, Padding
from regard.products import Output
from regard.reductions import Reduction
from regard.scores import QueryKey, Scores

__all__ = ["Fused"]


class Fused(Backend):
    """``scaled_dot_product_attention`` where it never forms the matrix.

    Its kernels fall back to the matrix itself, or are not exact, in some cases; ``takes`` says no
    to those: value heads that differ from key heads, a bias that needs a gradient or has a wider
    dtype, two masks at once, numbers that are not finite.
    """

    def takes(self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> bool:
        if len(reductions) != 1 or not isinstance(source, QueryKey) or not source.plain:
            return False
        (reduction,) = reductions
        if not isinstance(reduction, Output):
            return False
        value, key = reduction.value, source.key
        batched = value.ndim == key.ndim and value.shape[:-2] == key.shape[:-2]
        if not batched or value.dtype != key.dtype:
            return False
        return _expressible(source, mask) and _numbers_only(source)

    def reduce(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[Any, ...]:
        (reduction,) = reductions
        if not isinstance(source, QueryKey) or not isinstance(reduction, Output):
            raise ValueError("the fused backend computes weights @ value of query and key only")
        reduction.start(source.shape, source.dtype, source.device)
        return (_attend(source, mask, reduction.value),)


def _expressible(source: QueryKey, mask: Mask | None) -> bool:
    """Whether PyTorch's kernel takes bias and mask as they are, without forming the matrix."""
    if source.bias is not None:
        same = torch.promote_types(source.bias.dtype, source.dtype) == source.dtype
        plain = mask is None and same and not source.bias.requires_grad
        return plain and _one_batch_axis(source.bias, source.shape)
    if isinstance(mask, Keep):
        return _one_batch_axis(mask.mask, source.shape)
    if isinstance(mask, Padding):
        return _one_batch_axis(mask.lengths, source.shape)
    if not isinstance(mask, Causal):
        return mask is None
    # The causal kernel masks with -inf before it scales: wrong for a scale of 0 or below.
    first = mask.align == "top-left" or source.shape[-2] in (1, source.shape[-1])
    return first and source.scale > 0


def _one_batch_axis(tensor: Tensor, shape: torch.Size) -> bool:
    """Whether the batch axes of a tensor become one without a copy: all full, or all 1."""
    batch = shape[:-3]
    return tensor.shape[:-3] in (batch, (1,) * len(batch))


def _numbers_only(source: QueryKey) -> bool:
    """Whether query and key hold numbers only, read in one pass; an overflow counts as none.

    The CPU kernel gives 0 for some rows of NaN, and lets NaN out of keys that are masked. Elsewhere
    and under torch.compile the question is not asked: the answer would stop the device, or the
    graph.
    """
    if source.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    total = source.query.detach().sum(dtype=torch.float32)
    total = total + source.key.detach().sum(dtype=torch.float32)
    if source.bias is not None:
        total = total + 0 * source.bias.amax().clamp(min=0)  # -inf masks a key; NaN and inf do not
    return bool(total.isfinite())


def _attend(source: QueryKey, mask: Mask | None, value: Tensor) -> Tensor:
    # The kernel wants four axes and one width for query, key and value; zeros change nothing.
    shape, value_dim = source.shape, value.shape[-1]
    width = max(source.query.shape[-1], value_dim)
    query, key, value = (_four_axes(_widen(t, width)) for t in (source.query, source.key, value))
    extra: Tensor | None = source.bias
    if isinstance(mask, Keep):
        extra = mask.mask
    elif isinstance(mask, Padding):
        extra = torch.arange(shape[-1], device=query.device) < mask.lengths
    if extra is not None and extra.dtype != torch.bool:
        extra = extra.to(query.dtype)
    with torch.autocast(query.device.type, enabled=False):  # in the dtype that A.dtype says
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if extra is None else _four_axes(extra),
            is_causal=isinstance(mask, Causal) and (mask.align == "top-left" or shape[-2] > 1),
            scale=source.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.reshape(*shape[:-1], width)[..., :value_dim]


def _widen(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _four_axes(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, dim), with all batch axes in one and the last one contiguous.

    The kernel would form the matrix for numbers that do not lie side by side.
    """
    while tensor.ndim < 4:
        tensor = tensor[None]
    tensor = tensor.flatten(0, -4)
    beside = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor if beside else tensor.contiguous()
