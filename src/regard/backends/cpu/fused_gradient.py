"""The backward pass of a block: one more compiled pass computes the gradients of its scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.backends.cpu import kernels
from regard.reductions.divergences import Divergence, JensenShannon, KullbackLeibler
from regard.scores.box import Box

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
        weights: the weights there, float64; 0 for none.
        diagonals: the rows of a head that each diagonal crosses.
    """

    columns: Any
    weights: Any
    diagonals: list[slice]


Gradients = Sequence[Tensor | None]


def _with_gradient(
    answers: Sequence[Tensor],
    pull_back: Callable[[Gradients, Sequence[bool]], list[Tensor]],
    *inputs: Tensor,
) -> list[Tensor]:
    """Return answers that are already computed as parts of autograd's graph.

    Args:
        answers: numbers that depend on the inputs.
        pull_back: returns the gradients of the inputs, given those of the answers and which of them
            are needed.
        inputs: parts of the graph.
    """
    return list(cast(Any, _WithGradient).apply(tuple(answers), pull_back, *inputs))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, answers: tuple[Tensor, ...], pull_back: Any, *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pull_back = pull_back
        ctx.set_materialize_grads(False)
        return answers

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        both = zip(ctx.pull_back(gradients, needed), needed, strict=True)
        return None, None, *(found if is_needed else None for found, is_needed in both)


class Part(NamedTuple):
    """The scores of a tile during the backward pass.

    Attributes:
        rows: its rows among all rows of the block.
        columns: their positions in the matrix.
        raw: the scores, (rows, columns), -inf where masked; their gradients overwrite them.
    """

    rows: slice
    columns: slice
    raw: Any


@dataclass(frozen=True, eq=False)
class BlockGradient:
    """The backward pass of a block.

    With weights w, gradients g of the weights and e the row's mean, the gradient of score j is
    ``w_j (g_j - sum(w g) + g_mean (1 + score_j - maximum - e) + g_log_normalizer)``: the derivative
    of the softmax, with the maximum as a constant.

    Attributes:
        parts: returns the scores of the block, tile by tile; each is read before the next one.
        box: the place of the block in the matrix.
        norms: as ``kernels.finish_rows`` writes them.
        places: for each row, which of the sums it is added to, or -1, (all rows,).
        picks: where the largest weights and the diagonals are.
    """

    parts: Callable[[], Iterator[Part]]
    box: Box
    norms: Any
    places: Any
    picks: Picks

    def pull_back(self, of: Sequence[Tensor | None], take: Callable[[Part], None]) -> Tensor:
        """Replace the scores of each tile by their gradients; return those of the rows' sinks.

        Args:
            of: the gradients of the statistics, in the order of ``with_gradients``.
            take: is called with each tile of gradients.
        """
        norms, zeros = self.norms, np.zeros(len(self.norms))
        single = [zeros if g is None else g.reshape(-1).double().numpy() for g in of[:_SINGLE]]
        of_log, of_mean, of_sum = single[0] + single[1], single[2], single[3]
        of_sums, picked = of[_SUMS], self._picked(of[_TOP], of[_DIAGONALS:])
        places = np.zeros(len(norms), np.int64) if of_sums is None else self.places
        expected = self._expected(of_sums, places, picked)
        at_mean, at_sum = norms[:, kernels.MEAN], norms[:, kernels.ROW_SUM]
        constants = of_log - expected - of_mean * at_mean - of_sum * at_sum
        empty = cast(Any, np.isposinf(norms[:, kernels.NORMALIZER]))
        of_sink = np.where(empty, 0.0, constants * norms[:, kernels.OF_SINK])
        constants = np.where(empty, 0.0, constants + of_mean + of_sum).astype(np.float32)
        slopes = np.where(empty, 0.0, of_mean).astype(np.float32)
        for part in self.parts():
            at, given = part.rows, self._sum_gradients(of_sums, part.columns)
            kernels.pull_back(
                part.raw,
                norms[at],
                given,
                places[at],
                constants[at],
                slopes[at],
                part.columns.start,
                self.picks.columns[at],
                picked[at],
            )
            take(part)
        return torch.from_numpy(of_sink).float()

    def _sum_gradients(self, of_sums: Tensor | None, columns: slice) -> Any:
        """Return the gradients of the sums in some columns; the last row is 0."""
        width, start = columns.stop - columns.start, self.box.columns.start
        given = np.zeros((1, width), np.float32)
        if of_sums is None:
            return given
        some = of_sums[..., columns.start - start : columns.stop - start]
        return np.concatenate([some.reshape(-1, width).float().numpy(), given])

    def _picked(self, of_top: Tensor | None, of_diagonals: Sequence[Tensor | None]) -> Any:
        """Return the gradient of each single weight, (all rows, k + diagonals)."""
        columns, _, diagonals = self.picks
        picked = np.zeros(columns.shape, np.float32)
        k = columns.shape[1] - len(diagonals)
        if of_top is not None:
            picked[:, :k] = of_top.reshape(len(picked), k).numpy()
        rows = self.box.rows.stop - self.box.rows.start
        by_head = picked.reshape(len(picked) // rows, rows, columns.shape[1])
        for number, (some, gradient) in enumerate(zip(diagonals, of_diagonals, strict=True)):
            if gradient is not None:
                by_head[:, some, k + number] = gradient.reshape(len(by_head), -1).numpy()
        return picked

    def _expected(self, of_sums: Tensor | None, places: Any, picked: Any) -> Any:
        """Return the sum of weight * gradient of each row, (all rows,)."""
        expected = (self.picks.weights * picked).sum(-1)
        for part in self.parts() if of_sums is not None else ():
            at, given = part.rows, self._sum_gradients(of_sums, part.columns)
            kernels.expect(part.raw, self.norms[at], given, places[at], expected[at])
        return expected


def with_gradients(
    answers: Sequence[Tensor],
    gradient: BlockGradient,
    tiles: list[GradedTile],
    sink: Tensor | None,
) -> list[Tensor]:
    """Return the statistics of a block as parts of autograd's graph.

    Args:
        answers: log_normalizer, logsumexp, mean and row sum, each (..., rows); the largest weights,
            (..., rows, k); the sums, (..., parts, columns); and each diagonal.
        gradient: the backward pass.
        tiles: the scores that they depend on.
        sink: (..., rows, 1), the logit in the denominator.
    """
    first = torch.zeros((), dtype=torch.float32, device="cpu") if sink is None else sink

    def pull_back(of: Gradients, _needed: Sequence[bool]) -> list[Tensor]:
        of_sink = gradient.pull_back(of, _leave).view(*tiles[0].scores.shape[:-1], 1)
        found = (torch.from_numpy(tile.raw).view(tile.scores.shape) for tile in tiles)
        return [of_sink, *found]

    return _with_gradient(answers, pull_back, first, *(tile.scores for tile in tiles))


def _leave(part: Part) -> None:
    """Leave the gradients of a tile where its scores were."""


def with_product_gradients(
    answers: Sequence[Tensor], gradient: BlockGradient, query: Tensor, key: Tensor
) -> list[Tensor]:
    """Return the statistics of a block whose scores are a product as parts of autograd's graph.

    Their gradients need no scores that were kept, because each tile is computed again.

    Args:
        answers: as for ``with_gradients``.
        gradient: the backward pass.
        query: (..., num_heads, rows, dim), float32.
        key: (..., num_kv_heads, dim, columns), float32.
    """

    def pull_back(of: Gradients, needed: Sequence[bool]) -> list[Tensor]:
        heads, dim = key.shape[:-2].numel(), query.shape[-1]
        # A key and its queries: the rows of all heads of a group follow each other.
        queries = query.detach().reshape(heads, -1, dim)
        keys = key.detach().reshape(heads, dim, -1)
        of_query, of_key = torch.zeros_like(queries), torch.zeros_like(keys)
        start = gradient.box.columns.start

        def take(part: Part) -> None:
            scores = torch.from_numpy(part.raw).view(heads, -1, part.raw.shape[1])
            some = slice(part.columns.start - start, part.columns.stop - start)
            rows = part.rows if heads == 1 else slice(None)
            if needed[0]:
                of_query[:, rows].baddbmm_(scores, keys[..., some].mT)
            if needed[1]:
                of_key[..., some].baddbmm_(queries[:, rows].mT, scores)

        gradient.pull_back(of, take)
        return [of_query.view(query.shape), of_key.view(key.shape)]

    return _with_gradient(answers, pull_back, query, key)


def with_divergence_gradients(
    of: Divergence, numbers: Tensor, own: GradedRows, other: GradedRows
) -> Tensor:
    """Return the divergence of each row, (..., rows), as a part of autograd's graph.

    With D the divergence and E = sum(p dD/dp) over a row, the gradient of a score is
    ``p (dD/dp - E)`` and that of a sink ``-p E``.

    Args:
        of: the divergence.
        numbers: its values, (..., rows).
        own: the rows of the first matrix.
        other: the same rows of the second.
    """
    none = torch.zeros((), dtype=torch.float32, device="cpu")
    sinks = (none if rows.sink is None else rows.sink for rows in (own, other))
    # A key that only the second matrix masks makes the divergence infinite: a constant.
    finite = numbers.isfinite().reshape(-1).numpy()
    known = np.where(finite, numbers.reshape(-1).numpy(), 0)

    def pull_back(gradients: Gradients, _needed: Sequence[bool]) -> list[Tensor]:
        arriving = cast(Tensor, gradients[0]).reshape(-1).float().numpy()
        by_row = np.where(finite, arriving, np.float32(0))
        arrays = own.tile.raw, other.tile.raw, own.norms, other.norms, by_row
        expected = np.zeros((len(by_row), 2))
        if isinstance(of, JensenShannon):
            kernels.pull_back_jensen_shannon(*arrays, expected)
        else:
            sums = own.norms[:, kernels.ROW_SUM]
            of_entropy = np.float32(isinstance(of, KullbackLeibler))
            expected[:, 0] = known + of_entropy * sums
            expected[:, 1] = -sums
            constants = (expected[:, 0] - of_entropy).astype(np.float32)
            kernels.pull_back_cross(*arrays, of_entropy, constants)
        both = own, other
        return [
            *(torch.from_numpy(rows.tile.raw).view(rows.tile.scores.shape) for rows in both),
            *(_of_sink(rows, by_row * expected[:, place]) for place, rows in enumerate(both)),
        ]

    (found,) = _with_gradient([numbers], pull_back, own.tile.scores, other.tile.scores, *sinks)
    return found


def _of_sink(rows: GradedRows, expected: Any) -> Tensor:
    """Return the gradients of the sinks, (..., rows, 1)."""
    found = torch.from_numpy(-expected * rows.norms[:, kernels.OF_SINK]).float()
    return found.view(*rows.tile.scores.shape[:-1], 1)
