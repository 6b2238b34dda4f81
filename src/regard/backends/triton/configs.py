"""Tile sizes of each kernel, by head_dim, dtype and architecture.

Those of Hopper for 16 bits and a head_dim up to 128 were the fastest of about ten each on an H200,
at 16,384 tokens. The others follow the compiler's reports for Ampere and Hopper: a tile fits, and
at most a few registers spill.
"""

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["INTERPRETED", "Config", "Kernel", "config"]

Kernel = Literal["rows", "columns", "products", "pooled", "top"]


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
) -> Config:
    """Return the config of a kernel.

    Args:
        kernel: which one; "rows" and "top" have tiles of the same width for one question.
        head_dim: of query and key; of the operand of "products", where that is wider.
        dtype: of query and key; float32 where the operand of "products" is.
        capability: of the GPU.
        k: of the top-k that the row statistics and the top-k kernel keep in registers.
        crowded: True if a bias, a bool mask or a softcap needs more reads or registers per score.
    """
    hopper = capability[0] in (9, 10)  # 12, the consumers', has less than half the shared memory
    if kernel == "products" and dtype == torch.float32:
        if crowded:
            return Config(16, 32 if head_dim <= 128 else 16, 8, 2)
        return Config(64, 32, 8, 2) if head_dim <= 128 else Config(16, 32, 8, 1)
    if kernel == "products" and head_dim > 128:
        return Config(32, 64, 8, 2)
    if dtype == torch.float32:
        # Multiplied by threads one by one: small tiles, so that operands fit in registers.
        if crowded:
            return Config(16, 32, 4, 1) if kernel == "top" else Config(32, 32, 8, 1)
        tall = head_dim <= 128 and kernel != "top"
        return Config(64, 32, 4, 2) if tall else Config(32, 32, 4, 1)
    if kernel == "products":
        if crowded:
            return Config(64, 64, 4, 2)
        return Config(32, 128, 4, 2) if hopper else Config(64, 128, 8, 2)
    if crowded:
        # Hopper's matrix units take 64 rows of the first operand, which are the keys in columns.
        queries, keys = (32, 64) if kernel == "columns" else (64, 32)
        return Config(queries, keys, 4 if kernel == "top" else 8, 2)
    if hopper and head_dim <= 128 and k <= 16:
        # Several programs on a multiprocessor: the exps of one beside the product of another.
        if kernel == "rows":
            return Config(64, 128, 4, 3) if head_dim <= 64 else Config(128, 64, 8, 3)
        width = 128 if head_dim <= 64 and kernel == "top" else 64
        return Config(64 if kernel == "pooled" else 128, width, 4, 3)
    if k > 16:
        return Config(64, 64, 4 if hopper else 8, 2)
    width = 128 if head_dim <= 128 else 64
    if kernel == "top":
        return Config(128, width, 8, 2) if hopper else Config(32, width, 4, 2)
    if kernel == "pooled":
        return Config(128, 64, 8, 2)
    if head_dim > 128 or not hopper:
        return Config(128, width, 8, 2)
    return Config(128, width, 8, 3)
