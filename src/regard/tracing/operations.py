"""The PyTorch operations whose meaning the capture of hand-written attention needs.

Any other operation is followed by its inputs and outputs alone. For a tensor times a number, Python
runs ``aten.mul.Tensor`` and TorchScript runs ``aten.mul.Scalar``. A Tracer observes composite
operations such as ``aten.matmul`` as their parts.
"""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_Operations = tuple[Callable[..., Any], ...]

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

DISTANCES: _Operations = (aten._cdist_forward.default, aten._euclidean_dist.default)
"""Distances of all rows of two tensors."""

MULTIPLICATIONS: _Operations = (
    *(aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar),
)
DIVISIONS: _Operations = (aten.div.Tensor,)
ADDITIONS: _Operations = (aten.add.Tensor, aten.add_.Tensor)
TERMS: _Operations = (
    *(*ADDITIONS, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor),
    *(aten.cat.default, aten.constant_pad_nd.default),
)
"""Operations that add a bias or a sink to scores."""

SUMS: _Operations = (aten.sum.dim_IntList,)
NORMS: _Operations = (aten.logsumexp.default,)
"""The logarithm of what a softmax divides by, which merges the outputs of blocks of keys."""
SOFTMAXES: _Operations = (
    *(aten._softmax.default, aten._softmax.out, aten._safe_softmax.default),
    aten._sparse_softmax.default,
)
EXPONENTIALS: _Operations = (aten.exp.default, aten.exp_.default)
"""The first step of a softmax that is written out."""
RECIPROCALS: _Operations = (aten.reciprocal.default,)

COPIES: _Operations = (
    *(aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other),
    *(aten.clone.default, aten.contiguous.default, aten.reshape.default),
    *(aten.flatten.using_ints, aten.lift_fresh_copy.default),
)
"""Operations that copy a tensor if necessary, and may cast it."""
GATHERS: _Operations = (aten.index.Tensor, aten.gather.default, aten.index_select.default)
"""Operations that choose rows by an index."""

SAMPLERS: _Operations = (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
"""Operations that read a value between its tokens, as deformable attention does."""

DROPOUTS: _Operations = (aten.native_dropout.default,)
CHANCE: _Operations = (
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.bernoulli.default, aten.bernoulli.p),
)
"""Operations that draw a random 0 or 1 for each element, from which dropout is computed."""

SHAPES_ALONE: _Operations = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.full_like.default, aten.rand_like.default, aten.randn_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default),
    aten.new_full.default,
)
"""Operations that use only the shape, dtype and device of a tensor."""
