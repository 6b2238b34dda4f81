"""Tile sizes of each kernel, by head_dim, dtype and architecture.

Those of Hopper for 16 bits and a head_dim up to 128 were the fastest of about ten each on an H200,
at 16,384 tokens. The others follow the compiler's reports for Ampere and Hopper: a tile fits, and
at most a few registers spill.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from regard.backends.triton.operands import DivergenceKind

Kernel = Literal[
    "rows",
    "columns",
    "short_columns",
    "products",
    "pooled",
    "top",
    "row_products",
    "query_gradient",
    "key_gradient",
    "bias_gradient",
    "entries",
    "divergence",
]


@dataclass(frozen=True)
class Config:
    """The tile size and launch options of a kernel.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles that are loaded ahead.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Small, so that small matrices have several tiles.
INTERPRETED = Config(16, 32, 1, 1)


def config(
    kernel: Kernel,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    k: int = 0,
    crowded: bool = False,
    packed: bool = False,
    compared: DivergenceKind | None = None,
) -> Config:
    """Return the config of a kernel.

    Args:
        kernel: which one; "short_columns" is that of columns for parts of few rows.
        head_dim: of query and key; of the operand of "products", where that is wider.
        dtype: of query and key; float32 where the operand of "products" is.
        capability: of the GPU.
        k: of the top-k that the row statistics and the top-k kernel keep in registers.
        crowded: True if a bias, a softcap or many terms of a gradient need more reads or registers
            per score.
        packed: True if the mask has bits, whose tiles are read one stage later.
        compared: the divergence whose other matrix a gradient reads, too.
    """
    hopper = capability[0] in (9, 10)  # 12, the consumers', has less than half the shared memory
    wide = head_dim > 128
    if kernel == "top":
        return Config(max(2, 64 // _power_of_2(k)), 16, 4, 1)
    if kernel == "entries":
        return Config(32, 16, 4, 1)
    if kernel == "bias_gradient":
        return _of_bias(dtype, small=compared is not None and not hopper)
    if kernel == "divergence" or compared is not None:
        return _of_two(kernel, dtype, small=crowded or wide or not hopper, kind=compared)
    if kernel in ("query_gradient", "key_gradient"):
        return _of_gradient(kernel, wide, dtype, hopper, crowded)
    if kernel == "products":
        return _of_products(wide, dtype, hopper, crowded)
    if dtype == torch.float32:
        # Multiplied by threads one by one: small tiles, so that operands fit in registers.
        if crowded:
            return Config(32, 32, 8, 1)
        return Config(32, 32, 4, 1) if wide else Config(64, 32, 4, 2)
    if kernel in ("columns", "short_columns"):
        return _of_columns(kernel, small=wide or not hopper, crowded=crowded, packed=packed)
    # If tiles of keys are not loaded ahead, NVIDIA's compiler of 2025 reads unset registers in the
    # product of one warpgroup.
    miscompiled = kernel == "row_products" and head_dim.bit_count() > 1
    if crowded or miscompiled or (packed and kernel == "pooled"):
        # Hopper's matrix units take 64 rows of the first operand.
        return Config(64, 32, 8, 2)
    if kernel == "row_products":
        return Config(64, 32, 4, 2) if wide else Config(64, 64, 4, 3 if hopper else 2)
    if k > 16:
        return Config(64, 64, 4, 2) if hopper else Config(32, 64, 8, 2)
    if wide or not hopper:
        return Config(128, 64, 8, 2)
    if kernel == "pooled":
        return Config(64, 64, 4, 3)
    if packed:
        return Config(64, 64, 4, 4)
    if head_dim <= 64:
        return Config(64, 128, 4, 3)
    return Config(128, 128, 8, 2) if k <= 1 else Config(128, 64, 8, 3)


def _of_columns(kernel: Kernel, *, small: bool, crowded: bool, packed: bool) -> Config:
    """Return the config of a kernel whose tiles have the keys as rows."""
    if crowded:
        return Config(64, 64, 8, 2)
    if small:
        return Config(64, 64, 4, 2)
    if packed:
        return Config(128 if kernel == "columns" else 64, 64, 4, 3)
    return Config(128, 128, 4, 2) if kernel == "columns" else Config(64, 128, 4, 3)


def _of_products(wide: bool, dtype: torch.dtype, hopper: bool, crowded: bool) -> Config:
    """Return the config of a kernel that multiplies weights with an operand."""
    if dtype == torch.float32:
        if crowded:
            return Config(16, 16 if wide else 32, 8, 2)
        return Config(16, 32, 8, 1) if wide else Config(64, 32, 8, 2)
    if wide:
        return Config(32, 64, 8, 2)
    if crowded:
        return Config(64, 64, 4, 2)
    return Config(32, 128, 4, 2) if hopper else Config(64, 128, 8, 2)


def _of_bias(dtype: torch.dtype, *, small: bool) -> Config:
    """Return the config of the kernel of a bias, whose tiles are squares."""
    if dtype == torch.float32:
        return Config(16, 16, 4, 1)
    return Config(32, 32, 4, 1) if small else Config(64, 64, 8, 1)


def _of_gradient(
    kernel: Kernel, wide: bool, dtype: torch.dtype, hopper: bool, crowded: bool
) -> Config:
    """Return the config of a kernel that keeps a tile of gradients, as wide as head_dim."""
    by_rows = kernel == "query_gradient"
    if dtype == torch.float32:
        if wide or crowded:
            return Config(16, 32, 8, 1) if by_rows else Config(32, 16, 8, 1)
        return Config(32, 32, 8, 1)
    if wide:
        return Config(64, 32, 8, 1) if by_rows else Config(32, 64, 8, 1)
    if crowded or not hopper:
        return Config(64, 32, 8, 2) if by_rows else Config(32, 64, 8, 2)
    return Config(64, 64, 4, 2) if by_rows else Config(128, 64, 4, 2)


def _of_two(
    kernel: Kernel, dtype: torch.dtype, *, small: bool, kind: DivergenceKind | None
) -> Config:
    """Return the config of a kernel that computes the scores of two matrices."""
    if dtype == torch.float32:
        return Config(16, 16, 8, 1)
    if kernel == "divergence":
        return Config(64, 32, 8, 2) if small else Config(128, 32, 8, 2)
    if kernel == "query_gradient":
        return Config(64, 32, 8, 1) if small else Config(128, 64, 8, 2)
    if small:
        return Config(32, 64, 8, 1)
    return Config(32, 128, 8, 2) if kind == "jensen_shannon" else Config(64, 128, 8, 2)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
