"""The table of PyTorch operations that attention can consist of.

An operation that is in no group below is not supported: after it, scores or weights are no longer
tracked. For a tensor times a number, Python runs ``aten.mul.Tensor`` and TorchScript runs
``aten.mul.Scalar``. A Tracer observes composite operations such as ``aten.matmul`` as their parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = [
    "ADDED_PRODUCTS",
    "ASSIGNMENTS",
    "BOUNDS",
    "CASTS",
    "CHANCE",
    "COPIES",
    "COPY_INTO",
    "DIFFERENCES",
    "DROPOUTS",
    "EXPONENTIALS",
    "JOINS",
    "MULTIPLICATIONS",
    "NEGATIONS",
    "NO_NAN",
    "PRODUCTS",
    "QUOTIENTS",
    "REVERSED_DIFFERENCES",
    "ROW_SUMS",
    "SHAPES_ALONE",
    "SOFTMAXES",
    "SUMS",
    "TANH",
    "WHERE",
]

aten = torch.ops.aten
_Operations = tuple[Callable[..., Any], ...]


def _overloads(*names: str) -> _Operations:
    packets = (getattr(torch.ops.aten, name) for name in names)
    return tuple(each for packet in packets for each in (packet.Tensor, packet.Scalar))


# Products
ADDED_PRODUCTS: _Operations = (
    *(aten.addmm.default, aten.addmm.out, aten.addmm_.default),
    *(aten.baddbmm.default, aten.baddbmm.out, aten.baddbmm_.default),
)
"""Products to which a tensor is added."""
PRODUCTS: _Operations = (
    *(aten.mm.default, aten.mm.out, aten.bmm.default, aten.bmm.out),
    *(aten.mv.default, aten.mv.out, aten.dot.default, aten.vdot.default),
    *ADDED_PRODUCTS,
)
"""Products of two tensors over a shared axis."""

# Steps between the product of query and key and its softmax
SUMS = _overloads("add", "add_")
DIFFERENCES = _overloads("sub", "sub_")
MULTIPLICATIONS = _overloads("mul", "mul_")
QUOTIENTS = _overloads("div", "div_")
REVERSED_DIFFERENCES: _Operations = (aten.rsub.Scalar, aten.rsub.Tensor)
NEGATIONS: _Operations = (aten.neg.default, aten.neg_.default)
TANH: _Operations = (aten.tanh.default, aten.tanh_.default)
WHERE: _Operations = (aten.where.self,)
BOUNDS: _Operations = (
    *(aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.maximum.default),
    aten.clamp_min_.default,
)
NO_NAN: _Operations = (aten.nan_to_num.default, aten.nan_to_num_.default)
ASSIGNMENTS: Mapping[Callable[..., Any], int] = {
    **dict.fromkeys((aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default), 1),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill_.Scalar), 2),
    **dict.fromkeys((aten.masked_fill.Tensor, aten.masked_fill_.Tensor), 2),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), 2),
}
"""Operations that write values into a tensor, with the index of the values in their arguments."""

# Softmax, as one operation or as exponentials divided by their sums
SOFTMAXES: _Operations = (*(aten._softmax.default, aten._softmax.out, aten._safe_softmax.default),)
EXPONENTIALS: _Operations = (aten.exp.default, aten.exp_.default)
ROW_SUMS: _Operations = (aten.sum.dim_IntList,)

# Operations that keep every element
CASTS: _Operations = (
    *(aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other),
)
COPIES: _Operations = (
    *(aten.clone.default, aten.contiguous.default, aten.reshape.default),
    *(aten.flatten.using_ints, aten.lift_fresh_copy.default),
    *CASTS,
)
"""Operations that copy a tensor if necessary."""
COPY_INTO: _Operations = (aten.copy_.default,)
JOINS: _Operations = (
    *(aten.stack.default, aten.cat.default, aten.constant_pad_nd.default),
    *(aten.scatter.src, aten.scatter_.src),
)
"""Operations that combine several tensors into one."""

# Random numbers
DROPOUTS: _Operations = (aten.native_dropout.default,)
CHANCE: _Operations = (
    *(aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli_.Tensor),
    *(aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.uniform_.default),
)
"""Operations that draw random numbers, from which dropout can be computed."""

SHAPES_ALONE: _Operations = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.full_like.default, aten.rand_like.default, aten.randn_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default),
    aten.new_full.default,
)
"""Operations that use only the shape, dtype and device of a tensor."""
