"""The largest tensor that some work makes, and inputs whose matrix would be larger."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.backends import sweep as blocks

LENGTH = 4096
MATRIX = LENGTH * LENGTH
# A block of 2^20 numbers would be a sixteenth; the largest input or answer is 4096 x 16.
MOST = MATRIX // 6


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation gave memory to."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Memory, not elements: an expanded view of one number takes one number.
        sizes = [leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tensors]
        self.elements = max([self.elements, *sizes])
        return result


def inputs(*, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, LENGTH, 8, generator=generator) for _ in range(3)]
    query, key, value = (tensor.requires_grad_(gradients) for tensor in made)
    return query, key, value


def one_after_another(
    items: Iterable[Any],
    worker: Callable[[], Callable[[Any], Any]],
    take: Callable[[Any], None],
    *,
    threaded: bool,
    between: object = None,
) -> None:
    """``map_in_order`` without threads: a dispatch mode sees only the thread it was entered on."""
    answer = worker()
    for item in items:
        take(answer(item))


def largest(work: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as mode:
        patch.setattr(blocks, "map_in_order", one_after_another)
        work()
    return mode.elements
