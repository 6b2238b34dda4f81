"""Masks that hypothesis draws."""

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, torch.Size]:
    """A mask of bools, dense or sparse, that may have to be broadcast."""
    shape = torch.Size(draw(st.tuples(*(st.integers(1, n) for n in (2, 3, 11, 19)))))
    axes = [draw(st.sampled_from((1, n))) for n in shape]
    chance = draw(st.sampled_from((0.03, 0.5, 0.97)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(axes, generator=generator) < chance
    if draw(st.booleans()):
        mask = mask & regard.Causal().to_dense(*shape)
    return mask, shape
