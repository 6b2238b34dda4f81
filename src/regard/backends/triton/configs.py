"""How large the tiles of each kernel are: a table by head_dim, dtype and architecture."""

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["INTERPRETED", "Config", "Kernel", "config"]

Kernel = Literal["rows", "columns", "pooled", "top"]


@dataclass(frozen=True)
class Config:
    """The tile of a kernel and how it is run.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_warps: of a program.
        num_stages: how many tiles are on their way at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Small, so that small matrices have several tiles.
INTERPRETED = Config(16, 32, 1, 1)


def config(
    kernel: Kernel, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], k: int = 1
) -> Config:
    """The config of a kernel.

    Args:
        kernel: which one; "top" takes the keys of its tiles from "rows".
        head_dim: of query and key.
        dtype: of query and key.
        capability: of the GPU.
        k: of the top-k that the row statistics and the top-k kernel keep in registers.
    """
    hopper = capability[0] >= 9
    if kernel == "pooled" and dtype != torch.float32:
        return Config(128, 128 if head_dim <= 128 else 64, 8, 2)
    if dtype == torch.float32:
        return Config(64, 32, 4, 2) if head_dim <= 128 else Config(32, 32, 4, 1)
    if k > 16:
        return Config(64, 64, 4, 2)
    if head_dim <= 128:
        return Config(128, 128, 8, 3 if hopper else 2)
    return Config(128, 64, 8, 2)
