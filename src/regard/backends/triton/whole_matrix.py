"""All rows of a matrix as one block, whose numbers the Triton kernels have computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.reductions.block import RowStatistics
from regard.reductions.needs import Needs
from regard.reductions.products import TransposedOutput, WeightTile
from regard.reductions.reduction import Contribution, Reduction, RowStatistic
from regard.reductions.row_statistics import LogSumExp, MaxScore
from regard.reductions.sums import Diagonal, Sum
from regard.reductions.top_k import TopK
from regard.scores.box import Box

Answer = tuple[str, int]
"""The name of an answer of ``Request``, and its position among those of this name."""


@final
class WholeMatrix(RowStatistics):
    """The block of all rows that reductions read; ``Request`` names and computes its answers."""

    def __init__(self, shape: torch.Size, needs: Needs, answers: Mapping[Answer, Tensor]) -> None:
        self.shape, self._needs, self._answers = shape, needs, answers
        *leading, q_len, kv_len = (slice(0, length) for length in shape)
        self.box = Box(tuple(leading), q_len, kv_len)
        self.maximum = answers["maximum", 0].detach()[..., None]
        # A list as an index would make the CPU wait.
        self._diagonals, self._columns = (
            answers[name, 0].unbind(-1) if (name, 0) in answers else ()
            for name in ("diagonals", "columns")
        )
        self._sums = {
            of.spans(shape): answers["sums", position] for position, of in enumerate(needs.sums)
        }

    @property
    def largest_score(self) -> Tensor:
        return self._answers["maximum", 0]

    @property
    def log_normalizer(self) -> Tensor:
        return self._answers["log_normalizer", 0]

    @property
    def logsumexp(self) -> Tensor:
        return self._answers["logsumexp", 0]

    @property
    def mean_shifted(self) -> Tensor:
        return self._answers["mean_shifted", 0]

    @property
    def row_sum(self) -> Tensor:
        return self._answers["row_sum", 0]

    @property
    def visible_keys(self) -> Tensor:
        return self._answers["visible_keys", 0]

    def sum_rows(self, parts: Sequence[slice]) -> Tensor:
        spans = tuple((part.start, part.stop) for part in parts)
        return self._sums[spans, None].unsqueeze(-2)

    def sum_cells(self, parts: Sequence[slice], spans: Sequence[tuple[int, int]]) -> Tensor:
        return self._sums[tuple((part.start, part.stop) for part in parts), tuple(spans)]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        return self._answers["weights", 0][..., :k], self._answers["keys", 0][..., :k]

    def diagonal(self, offset: int) -> Tensor:
        of_all = self._diagonals[self._needs.sorted_offsets.index(offset)]
        return of_all[..., _rows_on(offset, self.shape)]

    def product(self, value: Tensor) -> Tensor:
        raise AssertionError("fused kernels give the products with values")

    def transposed_product(self, operand: Tensor) -> Tensor:
        position = next(n for n, each in enumerate(self._needs.operands) if each is operand)
        return self._answers["operands", position]

    def tile(self, rows: slice, columns: slice) -> Tensor:
        keys = range(self.shape[-1])[columns]
        numbers = [self._columns[self._needs.columns.index(key)] for key in keys]
        return torch.stack(numbers, -1)[..., rows, :]

    def divergence(self, of: object) -> Tensor | None:
        position = next(n for n, each in enumerate(self._needs.divergences) if each is of)
        return self._answers["divergences", position]


@dataclass(frozen=True)
class _LogNormalizer(RowStatistic):
    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.log_normalizer),)


@dataclass(frozen=True)
class _MeanShifted(RowStatistic):
    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.mean_shifted),)


def with_gradient(
    answer: Answer, gradient: Tensor, needs: Needs, shape: torch.Size
) -> Iterator[tuple[Reduction, Tensor]]:
    """Yield reductions that give the numbers of an answer, and the gradient of each one's sums.

    The sweep can then compute what a GPU has no memory for.
    """
    name, position = answer
    match name:
        case "logsumexp":
            yield LogSumExp(), gradient
        case "maximum":
            yield MaxScore(), gradient
        case "log_normalizer":
            yield _LogNormalizer(), gradient
        case "mean_shifted":
            yield _MeanShifted(), gradient
        case "row_sum":
            yield Sum(-1), gradient
        case "weights":
            yield TopK(needs.k), gradient
        case "diagonals":
            for number, offset in enumerate(needs.sorted_offsets):
                yield Diagonal(offset), gradient[..., _rows_on(offset, shape), number]
        case "columns":
            for number, key in enumerate(needs.columns):
                yield WeightTile(range(shape[-2]), range(key, key + 1)), gradient[..., number, None]
        case "sums":
            yield needs.sums[position], gradient
        case "operands":
            yield TransposedOutput(needs.operands[position]), gradient
        case _:
            yield needs.divergences[position], gradient


def _rows_on(offset: int, shape: torch.Size) -> slice:
    """Return the queries whose key at an offset exists."""
    q_len, kv_len = shape[-2:]
    return slice(min(max(0, -offset), q_len), max(0, min(q_len, kv_len - offset)))
