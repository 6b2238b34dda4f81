"""The backward pass of a block: one more compiled pass computes the gradients of its scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from regard.backends.cpu import kernels
from regard.reductions.divergences import Divergence, JensenShannon
from regard.scores.box import Box

# The order of the statistics: four with one number for each row, then the largest weights, the sums
# and the diagonals.
_SINGLE = 4
_TOP, _SUMS, _DIAGONALS = _SINGLE, _SINGLE + 1, _SINGLE + 2


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
    pull_back: Callable[[Gradients, Sequence[bool]], Sequence[Tensor | None]],
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
    """The scores of a tile.

    Attributes:
        rows: its rows among all rows of the block.
        columns: their positions in the matrix.
        raw: the scores, (rows, columns), -inf where masked; their gradients overwrite them.
        scores: the scores as a part of autograd's graph, (..., rows, columns), or None.
    """

    rows: slice
    columns: slice
    raw: Any
    scores: Tensor | None = None

    def pull_back(self) -> None:
        """Add gradients to the leaves of the scores; ``raw`` holds the gradients of the scores."""
        if self.scores is not None and self.scores.requires_grad:
            # A copy, because the next tile overwrites this memory.
            self.scores.backward(torch.from_numpy(self.raw).view(self.scores.shape).clone())


class Parts(Protocol):
    """A function that yields the scores of a block, tile by tile; each is read before the next."""

    def __call__(self, *, graded: bool = False) -> Iterator[Part]: ...


@dataclass(frozen=True, eq=False)
class BlockGradient:
    """The backward pass of a block.

    With weights w, gradients g of the weights and e the row's mean, the gradient of score j is
    ``w_j (g_j - sum(w g) + g_mean (1 + score_j - maximum - e) + g_log_normalizer)``: the derivative
    of the softmax, with the maximum as a constant.

    Attributes:
        parts: yields the scores of the block.
        box: the place of the block in the matrix.
        norms: as ``kernels.finish_rows`` writes them.
        places: for each row, which of the sums it is added to, or -1, (all rows,).
        picks: where the largest weights and the diagonals are.
    """

    parts: Parts
    box: Box
    norms: Any
    places: Any
    picks: Picks

    def pull_back(
        self, of: Sequence[Tensor | None], take: Callable[[Part], None], *, graded: bool = False
    ) -> Tensor:
        """Replace the scores of each tile by their gradients; return those of the rows' sinks.

        Args:
            of: the gradients of the statistics, in the order of ``with_gradients``.
            take: is called with each tile of gradients.
            graded: whether the tiles are parts of autograd's graph.
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
        for part in self.parts(graded=graded):
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
    answers: Sequence[Tensor], gradient: BlockGradient, sink: Tensor | None
) -> list[Tensor]:
    """Return the statistics of a block as parts of autograd's graph.

    Gradients are added to the leaves of each tile as it is computed again.

    Args:
        answers: log_normalizer, logsumexp, mean and row sum, each (..., rows); the largest weights,
            (..., rows, k); the sums, (..., parts, columns); and each diagonal.
        gradient: the backward pass.
        sink: (..., rows, 1), the logit in the denominator; None without.
    """

    def pull_back(of: Gradients, _needed: Sequence[bool]) -> list[Tensor | None]:
        of_sink = gradient.pull_back(of, Part.pull_back, graded=True)
        return [None, None if sink is None else of_sink.view(sink.shape)]

    return _with_gradient(answers, pull_back, _anchor(), _no_sink() if sink is None else sink)


def _anchor() -> Tensor:
    """Return a leaf that makes an answer a part of autograd's graph."""
    return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


def _no_sink() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def with_product_gradients(
    answers: Sequence[Tensor], gradient: BlockGradient, query: Tensor, key: Tensor
) -> list[Tensor]:
    """Return the statistics of a block whose scores are a product as parts of autograd's graph.

    Query and key get the gradients of all tiles from matrix products, without autograd.

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


class Pairs(Protocol):
    """A function that yields the scores of two matrices, tile by tile."""

    def __call__(self, *, graded: bool = False) -> Iterator[tuple[Part, Part]]: ...


def with_divergence_gradients(
    of: Divergence,
    numbers: Tensor,
    pairs: Pairs,
    norms: tuple[Any, Any],
    sinks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return the divergence of each row, (..., rows), as a part of autograd's graph.

    With D the divergence and E = sum(p dD/dp) over a row, the gradient of a score is
    ``p (dD/dp - E)`` and that of a sink ``-p E``.

    Args:
        of: the divergence.
        numbers: its values, (..., rows).
        pairs: yields the scores of both matrices.
        norms: of both, as ``kernels.finish_rows`` writes them.
        sinks: of both, (..., rows, 1), the logits in the denominator; None without.
    """
    first, second = norms
    # A key that only the second matrix masks makes the divergence infinite: a constant.
    finite = numbers.isfinite().reshape(-1).numpy()
    known = np.where(finite, numbers.reshape(-1).numpy(), 0)

    def expect() -> Any:
        expected = np.zeros((len(first), 2))
        if isinstance(of, JensenShannon):
            for own, other in pairs():
                at = own.rows
                args = own.raw, other.raw, first[at], second[at], expected[at]
                kernels.expect_jensen_shannon(*args)
        else:
            sums = first[:, kernels.ROW_SUM]
            expected[:, 0], expected[:, 1] = known + sums, -sums
        return expected

    def pull_back(gradients: Gradients, _needed: Sequence[bool]) -> list[Tensor | None]:
        arriving = cast(Tensor, gradients[0]).reshape(-1).float().numpy()
        by_row, expected = np.where(finite, arriving, np.float32(0)), expect()
        constants = (expected[:, 0] - 1).astype(np.float32)
        for own, other in pairs(graded=True):
            at = own.rows
            arrays = own.raw, other.raw, first[at], second[at], by_row[at]
            if isinstance(of, JensenShannon):
                kernels.pull_back_jensen_shannon(*arrays, expected[at])
            else:
                kernels.pull_back_relative_entropy(*arrays, constants[at])
            own.pull_back()
            other.pull_back()
        by_sink = [-by_row * expected[:, n] * norms[n][:, kernels.OF_SINK] for n in (0, 1)]
        of_sinks = [
            None if sink is None else torch.from_numpy(some).float().view(sink.shape)
            for sink, some in zip(sinks, by_sink, strict=True)
        ]
        return [None, *of_sinks]

    both = (_no_sink() if sink is None else sink for sink in sinks)
    return _with_gradient([numbers], pull_back, _anchor(), *both)[0]
