"""The backward pass of a block: one more compiled pass computes the gradients of its scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.backends.cpu import kernels
from regard.reductions.divergences import Divergence, JensenShannon, KullbackLeibler

__all__ = ["GradedRows", "GradedTile", "Picks", "with_divergence_gradients", "with_gradients"]

# The order of the statistics: four with one number for each row, then the largest weights, the sums
# and the diagonals.
_SINGLE = 4
_TOP, _SUMS, _DIAGONALS = _SINGLE, _SINGLE + 1, _SINGLE + 2


class GradedTile(NamedTuple):
    """A tile whose scores are a part of autograd's graph.

    Attributes:
        columns: their positions in the matrix.
        scores: (..., rows, columns).
        raw: the scores as an array, (all rows, columns), -inf where masked; their gradients
            overwrite them.
    """

    columns: slice
    scores: Tensor
    raw: Any


class GradedRows(NamedTuple):
    """Complete rows of one of the two matrices of a divergence.

    Attributes:
        tile: the only tile, with all columns.
        norms: as ``kernels.finish_rows`` writes them.
        sink: (..., rows, 1), the logit in the denominator; None without.
    """

    tile: GradedTile
    norms: Any
    sink: Tensor | None


class Picks(NamedTuple):
    """The single weights that have gradients: the k largest of each row, then those on diagonals.

    Attributes:
        columns: (all rows, k + diagonals), their positions in the matrix; -1 for none.
        diagonals: the rows of a head that each diagonal crosses.
    """

    columns: Any
    diagonals: list[slice]


def with_gradients(
    answers: Sequence[Tensor],
    tiles: list[GradedTile],
    norms: Any,
    places: Any,
    picks: Picks,
    sink: Tensor | None,
) -> list[Tensor]:
    """Return the statistics of a block as parts of autograd's graph.

    Args:
        answers: log_normalizer, logsumexp, mean and row sum, each (..., rows); the largest weights,
            (..., rows, k); the sums, (..., parts, columns); and each diagonal.
        tiles: the scores that they depend on.
        norms: as ``kernels.finish_rows`` writes them.
        places: for each row, which of the sums it is added to, or -1, (all rows,).
        picks: where the largest weights and the diagonals are.
        sink: (..., rows, 1), the logit in the denominator.
    """
    block = _Block(tiles, norms, places, picks)
    first = torch.zeros((), dtype=torch.float32, device="cpu") if sink is None else sink
    inputs = (first, *(tile.scores for tile in tiles))
    return list(cast(tuple[Tensor, ...], _Statistics.apply(block, tuple(answers), *inputs)))


class _Statistics(torch.autograd.Function):
    """Statistics that are already computed, with a backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, block: "_Block", answers: tuple[Tensor, ...], *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.block = block
        ctx.set_materialize_grads(False)
        return answers

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        block: _Block = ctx.block
        of_sink = block.gradients(gradients)
        shape = block.tiles[0].scores.shape
        sink = of_sink.view(*shape[:-1], 1) if ctx.needs_input_grad[2] else None
        tiles = (torch.from_numpy(tile.raw).view(tile.scores.shape) for tile in block.tiles)
        return None, None, sink, *tiles


@dataclass(frozen=True, eq=False)
class _Block:
    """A block after its forward pass.

    With weights w, gradients g of the weights and e the row's mean, the gradient of score j is
    ``w_j (g_j - sum(w g) + g_mean (1 + score_j - maximum - e) + g_log_normalizer)``: the derivative
    of the softmax, with the maximum as a constant.
    """

    tiles: list[GradedTile]
    norms: Any
    places: Any
    picks: Picks

    def gradients(self, of: Sequence[Tensor | None]) -> Tensor:
        """Replace the scores of each tile by their gradients; return those of the rows' sinks."""
        norms, zeros = self.norms, np.zeros(len(self.norms))
        single = [zeros if g is None else g.reshape(-1).double().numpy() for g in of[:_SINGLE]]
        of_log, of_mean, of_sum = single[0] + single[1], single[2], single[3]
        picked = self._picked(of[_TOP], of[_DIAGONALS:])
        expected = self._expected_picks(picked)
        places = np.zeros(len(norms), np.int64) if of[_SUMS] is None else self.places
        if of[_SUMS] is not None:
            for tile, given in self._given(of[_SUMS]):
                kernels.expect(tile.raw, norms, given, places, expected)
        at_mean, at_sum = norms[:, kernels.MEAN], norms[:, kernels.ROW_SUM]
        constants = of_log - expected - of_mean * at_mean - of_sum * at_sum
        empty = cast(Any, np.isposinf(norms[:, kernels.NORMALIZER]))
        of_sink = np.where(empty, 0.0, constants * norms[:, kernels.OF_SINK])
        constants = np.where(empty, 0.0, constants + of_mean + of_sum).astype(np.float32)
        slopes = np.where(empty, 0.0, of_mean).astype(np.float32)
        for tile, given in self._given(of[_SUMS]):
            kernels.pull_back(
                tile.raw,
                norms,
                given,
                places,
                constants,
                slopes,
                tile.columns.start,
                self.picks.columns,
                picked,
            )
        return torch.from_numpy(of_sink).float()

    def _given(self, of_sums: Tensor | None) -> Iterator[tuple[GradedTile, Any]]:
        """Yield each tile with the gradients of the sums in its columns; the last row is 0."""
        start = self.tiles[0].columns.start
        for tile in self.tiles:
            width = tile.columns.stop - tile.columns.start
            given = np.zeros((1, width), np.float32)
            if of_sums is not None:
                some = of_sums[..., tile.columns.start - start : tile.columns.stop - start]
                given = np.concatenate([some.reshape(-1, width).float().numpy(), given])
            yield tile, given

    def _picked(self, of_top: Tensor | None, of_diagonals: Sequence[Tensor | None]) -> Any:
        """Return the gradient of each single weight, (all rows, k + diagonals)."""
        columns, diagonals = self.picks
        picked = np.zeros(columns.shape, np.float32)
        k = columns.shape[1] - len(diagonals)
        if of_top is not None:
            picked[:, :k] = of_top.reshape(len(picked), k).numpy()
        rows = self.tiles[0].scores.shape[-2]
        by_head = picked.reshape(len(picked) // rows, rows, columns.shape[1])
        for number, (some, gradient) in enumerate(zip(diagonals, of_diagonals, strict=True)):
            if gradient is not None:
                by_head[:, some, k + number] = gradient.reshape(len(by_head), -1).numpy()
        return picked

    def _expected_picks(self, picked: Any) -> Any:
        """Return the sum of weight * gradient over the single weights of each row, (all rows,)."""
        rows = np.arange(len(picked))[:, None]
        norms = self.norms[:, None]
        expected = np.zeros(len(picked))
        if not picked.any():
            return expected
        for tile in self.tiles:
            columns = self.picks.columns - tile.columns.start
            inside = (columns >= 0) & (columns < tile.raw.shape[1])
            shifted = tile.raw[rows, np.where(inside, columns, 0)] - norms[..., kernels.REFERENCE]
            weights = np.exp(shifted - norms[..., kernels.NORMALIZER])
            expected += np.where(inside, weights * picked, 0.0).sum(-1)
        return expected


def with_divergence_gradients(
    of: Divergence, numbers: Tensor, own: GradedRows, other: GradedRows
) -> Tensor:
    """Return the divergence of each row, (..., rows), as a part of autograd's graph.

    Args:
        of: the divergence.
        numbers: its values, (..., rows).
        own: the rows of the first matrix.
        other: the same rows of the second.
    """
    none = torch.zeros((), dtype=torch.float32, device="cpu")
    sinks = (none if rows.sink is None else rows.sink for rows in (own, other))
    inputs = (own.tile.scores, other.tile.scores, *sinks)
    return cast(Tensor, _Divergence.apply(of, (numbers,), (own, other), *inputs))


class _Divergence(torch.autograd.Function):
    """Divergences that are already computed, with a backward pass.

    With D the divergence and E = sum(p dD/dp) over a row, the gradient of a score is
    ``p (dD/dp - E)`` and that of a sink ``-p E``.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        of: Divergence,
        numbers: tuple[Tensor],
        pair: tuple[GradedRows, GradedRows],
        *_inputs: Tensor,
    ) -> Tensor:
        ctx.of, ctx.pair = of, pair
        ctx.finite = numbers[0].isfinite()
        ctx.numbers = numbers[0].clone()
        return numbers[0]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        pair: tuple[GradedRows, GradedRows] = ctx.pair
        own, other = pair
        # A key that only the second matrix masks makes the divergence infinite: a constant.
        finite = ctx.finite.reshape(-1).numpy()
        gradients = np.where(finite, grad_outputs[0].reshape(-1).float().numpy(), np.float32(0))
        arrays = own.tile.raw, other.tile.raw, own.norms, other.norms, gradients
        expected = np.zeros((len(gradients), 2))
        if isinstance(ctx.of, JensenShannon):
            kernels.pull_back_jensen_shannon(*arrays, expected)
        else:
            sums = own.norms[:, kernels.ROW_SUM]
            of_entropy = np.float32(isinstance(ctx.of, KullbackLeibler))
            numbers = np.where(finite, ctx.numbers.reshape(-1).numpy(), 0)
            expected[:, 0] = numbers + of_entropy * sums
            expected[:, 1] = -sums
            constants = (expected[:, 0] - of_entropy).astype(np.float32)
            kernels.pull_back_cross(*arrays, of_entropy, constants)
        scores = (
            torch.from_numpy(rows.tile.raw).view(rows.tile.scores.shape) if wanted else None
            for rows, wanted in zip(pair, ctx.needs_input_grad[3:5], strict=True)
        )
        sinks = (
            _of_sink(rows, gradients * expected[:, place]) if wanted else None
            for place, (rows, wanted) in enumerate(zip(pair, ctx.needs_input_grad[5:], strict=True))
        )
        return None, None, None, *scores, *sinks


def _of_sink(rows: GradedRows, expected: Any) -> Tensor:
    """Return the gradients of the sinks, (..., rows, 1)."""
    found = torch.from_numpy(-expected * rows.norms[:, kernels.OF_SINK]).float()
    return found.view(*rows.tile.scores.shape[:-1], 1)
