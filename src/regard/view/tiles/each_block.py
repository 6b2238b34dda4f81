"""A call for each block of rows: progress that is told, and work that nobody waits for any more."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from regard.reductions.block import RowStatistics
from regard.reductions.reduction import Contribution, Reduction

__all__ = ["EachBlock"]


@final
@dataclass(frozen=True, eq=False)
class EachBlock(Reduction):
    """A reduction without an answer that calls a function for each block of a pass.

    Args:
        call: called with the number of rows of all heads, on several threads; what it raises ends
            the pass.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.each_block import EachBlock
        >>> even = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> even.reduce(regard.Pool(1, 1), EachBlock(print))[0]
        2
        tensor([[0.5000]])
    """

    thread_safe = True
    reads_statistics = True

    call: Callable[[int], object]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return ()

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        self.call(prod(part.stop - part.start for part in block.box.at_rows))
        return ()

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> None:
        return None
