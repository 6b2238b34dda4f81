"""Gradients of answers: the terms of the derivative by the weights, and the kernels that use them.

``gradient_kernels`` has the formula. Here are the terms of each reduction, and the numbers of a row
that need no pass over the matrix: for a sum of weights times shifted scores, the row sum of W G is
that sum.
"""

from collections.abc import Iterator
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.launch import Launch, RowStatistics, spans_between
from regard.backends.triton.operands import CellNumbers, Derivative, OtherMatrix


class _Product(NamedTuple):
    name: int
    left: Tensor
    right: Tensor
    gradient: Tensor  # of left
    sums: Tensor  # of W G over each row


class Derivatives:
    """The derivative of a loss by the scores of one matrix, collected from its answers.

    Numbers that arrive have the shape of an answer, with a batch axis and a head axis.
    """

    def __init__(self, launch: Launch, rows: RowStatistics) -> None:
        self._launch, self._rows = launch, rows
        self._offset = torch.zeros_like(rows.logsumexp)  # u + b - a - D
        self._of_logsumexp = torch.zeros_like(rows.logsumexp)
        self._row_sums = torch.zeros_like(rows.logsumexp)  # D
        self._slope: Tensor | None = None
        self._columns: Tensor | None = None
        self._grids: list[CellNumbers] = []
        self._products: list[_Product] = []
        self._keys: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._collected: list[Derivative] | None = None

    @classmethod
    def of_divergence(
        cls,
        launch: Launch,
        rows: RowStatistics,
        other: OtherMatrix,
        answers: Tensor,
        mass: Tensor,
    ) -> "Derivatives":
        """Return the derivative of a divergence alone.

        Its parts cancel where rows are nearly equal, so no kernel rounds them one by one.

        Args:
            launch: of the differentiated matrix.
            rows: its row statistics.
            other: the other matrix, and the numbers that arrive, 0 for infinite divergences.
            answers: the divergence, (batch, num_heads, q_len); of Jensen-Shannon the half that is
                measured from the differentiated matrix.
            mass: the sums of the weights of the first matrix, of the same shape.
        """
        made = cls(launch, rows)
        match other.kind:
            case "kullback_leibler":
                made._row_sums = other.numbers * (answers + mass)
                made._offset = other.numbers
            case "second":
                made._row_sums = -other.numbers * mass
            case "jensen_shannon":
                made._row_sums = other.numbers * answers
        made._collected = [Derivative(made._offset - made._row_sums, other=other)]
        return made

    def add_logsumexp(self, numbers: Tensor) -> None:
        self._offset += numbers
        self._of_logsumexp += numbers

    def add_mean_shifted(self, numbers: Tensor) -> None:
        assert self._rows.mean_shifted is not None
        self._slope = numbers.clone() if self._slope is None else self._slope + numbers
        self._offset += numbers * (1 + self._rows.norms.above * log(2))
        self._row_sums += numbers * self._rows.mean_shifted

    def add_row_sums(self, numbers: Tensor) -> None:
        self._offset += numbers
        self._row_sums += numbers * self._rows.mass

    def add_column_sums(self, numbers: Tensor) -> None:
        self._columns = numbers if self._columns is None else self._columns + numbers

    def add_grid(self, down: Tensor, across: Tensor, numbers: Tensor) -> None:
        """Add numbers for cells: disjoint spans of queries, and spans of keys that may overlap."""
        *_, q_len, kv_len = self._launch.given.shape
        parts = spans_between(across.flatten())
        # (spans, parts): the parts that a span covers
        covers = (across[:, :1] <= parts[:, 0]) & (parts[:, 1] <= across[:, 1:])
        # In float64: a part may lie in many spans.
        of_parts = numbers.double() @ covers.to(numbers.device, torch.float64, non_blocking=True)
        places = _places(down, q_len), _places(parts, kv_len)
        rows, columns = (each.to(numbers.device, non_blocking=True) for each in places)
        self._grids.append(
            CellNumbers(of_parts.float().contiguous(), (down, parts), (rows, columns))
        )

    def add_product(self, name: int, operand: Tensor, numbers: Tensor) -> None:
        """Add numbers for weights.mT @ operand, (batch, num_heads, kv_len, width)."""
        if numbers.ndim == 3:
            numbers = numbers[..., None]
        right = numbers.to(operand.dtype).contiguous()
        derivative = Derivative(self._offset, left=operand, right=right)
        norms = self._rows.norms
        total, gradient = self._launch.row_products(norms, derivative, sums=True, products=True)
        assert total is not None
        assert gradient is not None
        self._row_sums += total
        self._products.append(_Product(name, operand, right, gradient, total))

    def add_weights(self, keys: Tensor, weights: Tensor, numbers: Tensor) -> None:
        """Add numbers for some weights of each row, (batch, num_heads, q_len, count)."""
        of_scores = weights * numbers
        self._row_sums += of_scores.sum(-1)
        self.add_scores(keys, weights.log() + self._rows.logsumexp[..., None], of_scores)

    def add_scores(self, keys: Tensor, scores: Tensor, numbers: Tensor) -> None:
        """Add numbers for some scores of each row, (batch, num_heads, q_len, count)."""
        softcap = self._launch.given.softcap
        if softcap is not None:
            numbers = numbers * (1 - (scores / softcap).square())
        self._keys.append(keys)
        self._numbers.append(numbers.masked_fill(keys < 0, 0))

    def query_gradient(self) -> Tensor:
        """Return the gradient of the query of the operands, float32."""
        norms = self._rows.norms
        return sum_of(self._launch.query_gradient(norms, each) for each in self._all())

    def key_gradient(self) -> Tensor:
        """Return the gradient of the key of the operands, float32."""
        norms = self._rows.norms
        return sum_of(self._launch.key_gradient(norms, each) for each in self._all())

    def bias_gradient(self, size: torch.Size | None) -> Tensor:
        """Return the gradient of the bias of the operands, as ``Launch.bias_gradient`` does."""
        norms = self._rows.norms
        return sum_of(self._launch.bias_gradient(norms, each, size) for each in self._all())

    def sink_gradient(self) -> Tensor:
        """Return the gradient of the sink, (batch, num_heads): that of a key with G = 0."""
        self._all()
        sink, logsumexp = self._launch.given.sink, self._rows.logsumexp
        assert sink is not None
        weights = (sink[..., None] - logsumexp).exp().masked_fill(logsumexp == -torch.inf, 0)
        return (weights * (self._of_logsumexp - self._row_sums)).sum(-1)

    def operand_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the name of each operand, and weights @ numbers, with all heads."""
        for product in self._products:
            yield product.name, product.gradient

    def _all(self) -> list[Derivative]:
        """Return the derivatives to launch: one, and one more for each further grid or product."""
        if self._collected is not None:
            return self._collected
        norms = self._rows.norms
        grids = list(self._grids) or [None]
        further: list[Derivative] = []  # each less its own sum, because each is rounded alone
        further_sums = torch.zeros_like(self._row_sums)
        for place, grid in enumerate(grids):
            columns = self._columns if place == 0 else None
            if grid is None and columns is None:
                continue
            derivative = Derivative(self._offset, columns=columns, grid=grid)
            total, _ = self._launch.row_products(norms, derivative, sums=True, products=False)
            assert total is not None
            self._row_sums += total
            if place:
                further.append(Derivative(-total, grid=grid))
                further_sums += total
        for product in self._products[1:]:
            further.append(Derivative(-product.sums, left=product.left, right=product.right))
            further_sums += product.sums
        product = self._products[0] if self._products else None
        first = Derivative(
            self._offset - (self._row_sums - further_sums),
            self._slope,
            self._columns,
            grids[0],
            left=None if product is None else product.left,
            right=None if product is None else product.right,
            keys=torch.cat(self._keys, -1) if self._keys else None,
            numbers=torch.cat(self._numbers, -1) if self._numbers else None,
        )
        self._collected = [first, *further]
        return self._collected


def sum_of(tensors: Iterator[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    total = next(tensors)
    for tensor in tensors:
        total += tensor
    return total


def _places(spans: Tensor, length: int) -> Tensor:
    """Return the number of the span that each token lies in, int32 (length,).

    Between spans it is -1 - n, with n the number of the next span.
    """
    token = torch.arange(length, device="cpu")
    span = torch.searchsorted(spans[:, 0].contiguous(), token, right=True) - 1
    inside = (span >= 0) & (token < spans[span.clamp(min=0), 1])
    return torch.where(inside, span, -2 - span).int()
