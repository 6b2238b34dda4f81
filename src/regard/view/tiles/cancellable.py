"""Questions to a matrix that end soon after nobody waits for their answers any more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from regard.recording.layers import Answers, Layer
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction

__all__ = ["Watched", "answered"]


@final
@dataclass(frozen=True, eq=False)
class Watched(Reduction):
    """Another reduction, with the same answer, that is interrupted between blocks of rows.

    Attributes:
        asked: the other one, which is safe on several threads.
        pause: called before each block; what it raises ends the pass.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.cancellable import Watched
        >>> even = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> even.reduce(Watched(regard.Pool(1, 1), lambda: None))
        tensor([[0.5000]])
    """

    thread_safe = True

    asked: Reduction
    pause: Callable[[], None]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.asked.tensors

    @property
    def group(self) -> int:
        return self.asked.group

    def rows(self, q_len: int) -> range:
        return self.asked.rows(q_len)

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return self.asked.start(shape, dtype, device)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        self.pause()
        return self.asked.update(block)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Any:
        return self.asked.finish(buffers, shape)


def answered(layer: Layer, reductions: Sequence[Reduction], pause: Callable[[], None]) -> Layer:
    """A layer that has the answers to some questions, as if they had been kept.

    Args:
        layer: with its matrix.
        reductions: the questions.
        pause: called before each block of rows; what it raises ends the pass.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.cancellable import answered
        >>> even = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> [layer] = regard.Recording({"layer": even}).layers
        >>> answered(layer, [regard.Sum(-1)], lambda: None).answers
        Answers(Sum(dim=-1))
    """
    missing = [reduction for reduction in reductions if reduction not in layer.answers]
    if not missing:
        return layer
    first, *others = missing  # all see the same blocks: it is enough that one pauses
    found = layer.whole().reduce(Watched(first, pause), *others)
    pairs = zip(missing, found if len(missing) > 1 else (found,), strict=True)
    return replace(layer, answers=Answers(pairs).before(layer.answers))
