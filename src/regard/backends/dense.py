"""The reference that the faster backends are compared with: the whole matrix in float64."""

from collections.abc import Sequence
from typing import Any, final

import torch

from regard.backends.autograd_limits import refuse_vmap
from regard.backends.backend import Backend, Between, nothing
from regard.errors import DENSE_LIMIT, check_memory
from regard.masks import Mask
from regard.reductions.block import Block
from regard.reductions.reduction import Reduction, contributions
from regard.scores.box import Box
from regard.scores.score_source import Scores


@final
class Dense(Backend):
    """Every reduction of softmax(scores) as a dense float64 tensor, for small matrices."""

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        memory = 2 * source.shape.numel() * torch.float64.itemsize  # scores and weights
        return "the whole matrix in float64", memory

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        """Return one answer for each reduction, in float64.

        Raises:
            MemoryError: the matrix exceeds 4 GiB.
        """
        refuse_vmap([*source.tensors, *(t for reduction in reductions for t in reduction.tensors)])
        shape = source.shape
        check_memory("backend='dense'", shape, torch.float64, DENSE_LIMIT)
        source = source.map(lambda tensor: tensor.double())
        buffers = [r.start(shape, torch.float64, source.device) for r in reductions]
        between(0, 1)
        block = Block(source, mask, _whole(shape))
        answers: list[Any] = []
        for reduction, sums in zip(reductions, buffers, strict=True):
            for total, part in zip(sums, contributions(reduction, block, len(sums)), strict=True):
                total[part.at].add_(part.value)
            answers.append(reduction.finish(sums, shape))
        between(1, 1)
        return tuple(answers)


def _whole(shape: torch.Size) -> Box:
    *leading, rows, columns = (slice(0, n) for n in shape)
    return Box(tuple(leading), rows, columns)
