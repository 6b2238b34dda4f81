"""The answers to several reductions of one matrix, and their gradients, by the Triton kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from regard.backends.triton.operands import (
    DivergenceKind,
    OtherMatrix,
    operands,
    position_numbers,
    query_factor,
)
from regard.masks import Mask
from regard.reductions.divergences import Divergence, JensenShannon
from regard.reductions.products import TransposedOutput, Window
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import (
    Entropy,
    LogSumExp,
    MaxScore,
    NormalizedEntropy,
)
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import TopK
from regard.scores.query_key import QueryKeyScores

if TYPE_CHECKING:
    from regard.backends.triton.derivatives import Derivatives
    from regard.backends.triton.launch import Launch, RowStatistics

MOST_STRIPS = 2**26  # numbers between two passes: 256 MiB


@dataclass(frozen=True, eq=False)
class Request:
    """Several reductions of one matrix; each pass runs once, when it is first needed."""

    source: QueryKeyScores
    mask: Mask | None
    reductions: tuple[Reduction, ...]
    graded: bool
    kept: dict[str, Tensor]  # numbers of the forward pass, in the backward pass
    compared: bool = False  # with another matrix, by a divergence

    @cached_property
    def launch(self) -> "Launch":
        from regard.backends.triton.launch import Launch  # imports triton

        return Launch(operands(self.source, self.mask, self.kept))

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The numbers of the forward pass that the backward pass reads, by name."""
        rows, packed = self.rows, self.launch.given.limits.packed
        numbers: dict[str, Tensor | None] = {
            "logsumexp": rows.logsumexp,
            "top": rows.norms.top,
            "above": rows.norms.above,
            "maximum": rows.maximum,
            "entropy": rows.entropy,
            "mass": rows.mass,
        }
        if self.largest_k:
            numbers["weights"], numbers["keys"] = self.largest
        if self.offsets:
            numbers["on_diagonals"] = self.on_diagonals
        if self.columns:
            numbers["in_columns"] = self.in_columns
        if NormalizedEntropy() in self.reductions:
            numbers["visible_keys"] = self.visible_keys
        if packed is not None:
            numbers["slots"], numbers["words"] = packed.slots, packed.words
        for place, (other, answers) in enumerate(self.divergences):
            numbers |= {f"{place} {name}": each for name, each in other.numbers.items()}
            numbers |= {f"{place} divergence": answers.numbers, f"{place} half": answers.half}
        return {name: tensor for name, tensor in numbers.items() if tensor is not None}

    @cached_property
    def divergences(self) -> "list[tuple[Request, _Divergences]]":
        """The other matrix of each divergence, and its answers."""
        found: list[tuple[Request, _Divergences]] = []
        for reduction in self.reductions:
            if isinstance(reduction, Divergence):
                start = f"{len(found)} "
                kept = {
                    name.removeprefix(start): each
                    for name, each in self.kept.items()
                    if name.startswith(start)
                }
                source = cast(QueryKeyScores, reduction.source)
                other = Request(source, reduction.mask, (), self.graded, kept, compared=True)
                if kept:
                    answers = _Divergences(kept["divergence"], kept.get("half"))
                else:
                    answers = self._diverge(reduction, other)
                found.append((other, answers))
        return found

    def _diverge(self, reduction: Divergence, other: "Request") -> "_Divergences":
        symmetric = isinstance(reduction, JensenShannon)
        kind = "jensen_shannon" if symmetric else "kullback_leibler"
        beside = other.beside(self.rows.logsumexp, kind)  # the numbers are not read
        totals, of_first = self.launch.divergence(
            self.rows.norms, beside, shares=symmetric and self.graded
        )
        own, its = (_RowNumbers.of(each.rows) for each in (self, other))
        numbers = reduction.combine(own, its, totals)
        return _Divergences(numbers, of_first)

    @cached_property
    def rows(self) -> "RowStatistics":
        if self.kept:
            from regard.backends.triton.launch import RowStatistics  # imports triton
            from regard.backends.triton.tile import Norms

            kept = self.kept
            norms = Norms(kept["top"], kept["above"])
            names = ("maximum", "entropy", "mass", "tiles", "maxima")
            return RowStatistics(kept["logsumexp"], norms, *map(kept.get, names))
        return self.launch.rows(
            maximum=MaxScore() in self.reductions,
            entropy=any(isinstance(r, Entropy | NormalizedEntropy) for r in self.reductions),
            mass=self.source.sink_bias is not None
            or self.compared
            or any(isinstance(r, Divergence) or r == Sum(-1) for r in self.reductions),
            k=self.largest_k,
        )

    @cached_property
    def largest_k(self) -> int:
        """The largest k of the TopK reductions; 0 if there are none.

        The gradient of the largest score goes to its key, which the forward pass finds.
        """
        least = int(self.graded and MaxScore() in self.reductions)
        return max((r.k for r in self.reductions if isinstance(r, TopK)), default=least)

    @cached_property
    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weights and their keys, (batch, num_heads, q_len, largest_k)."""
        if self.kept:
            return self.kept["weights"], self.kept["keys"]
        return self.launch.top(self.rows, self.largest_k)

    @cached_property
    def offsets(self) -> list[int]:
        """The offsets of the diagonals that are asked."""
        return sorted({r.offset for r in self.reductions if isinstance(r, Diagonal)})

    @cached_property
    def columns(self) -> list[int]:
        """The keys of the columns that are asked."""
        return sorted({j for r in self.reductions if isinstance(r, Window) for j in r.at_columns})

    @cached_property
    def on_diagonals(self) -> Tensor:
        """The weights at each offset, (batch, num_heads, q_len, offsets); 0 outside the matrix."""
        if "on_diagonals" in self.kept:
            return self.kept["on_diagonals"]
        return self.launch.entries(self.rows.norms, self.offsets, diagonal=True)

    @cached_property
    def in_columns(self) -> Tensor:
        """The weights in each column, (batch, num_heads, q_len, columns)."""
        if "in_columns" in self.kept:
            return self.kept["in_columns"]
        return self.launch.entries(self.rows.norms, self.columns, diagonal=False)

    @cached_property
    def visible_keys(self) -> Tensor:
        """The number of visible keys of each row, at least 1, (batch, num_heads, q_len)."""
        if "visible_keys" in self.kept:
            return self.kept["visible_keys"]
        return self.launch.visible_keys(self.rows.norms)

    @cached_property
    def column_sums(self) -> Tensor:
        if self.grids is not None and self.grids.strip == 1:
            from regard.backends.triton.launch import joined_parts  # imports triton

            return joined_parts(self.grids.strips)
        return self.launch.column_sums(self.rows.norms)

    @cached_property
    def grids(self) -> "_Grids | None":
        """The mass of all pooled maps and segments by one pass over the columns, if that can be."""
        grids = [r for r in self.reductions if isinstance(r, Pool | Segments)]
        if not grids:
            return None
        sums = Sum(-2) in self.reductions
        return _Grids.by_strips(self.launch, self.rows, grids, sums=sums)

    def _mass(self, reduction: Pool | Segments) -> Tensor:
        down, across = spans_of(reduction, self.source.shape)
        if self.grids is not None:
            return self.grids.mass(self.launch, down, across)
        return self.launch.spans(self.rows.norms, down, across)

    def forward(self, between: Callable[[int], None]) -> tuple[Tensor, ...]:
        """Return what ``finish`` of each reduction takes, with the axes of the matrix.

        Args:
            between: called with the number of reductions whose kernels have been launched.
        """
        between(0)
        raw: list[Tensor] = []
        divergences = iter(self.divergences)
        for done, reduction in enumerate(self.reductions, 1):
            if isinstance(reduction, Divergence):
                answers: Sequence[Tensor | None] = (next(divergences)[1].numbers,)
            else:
                answers = self._raw(reduction)
            for answer in answers:
                assert answer is not None
                # A copy, so that a change of an answer in place changes nothing that is saved.
                raw.append(answer.reshape(*self.source.shape[:-2], *answer.shape[2:]).clone())
            between(done)
        return tuple(raw)

    def _raw(self, reduction: Reduction) -> Sequence[Tensor | None]:
        """Return the sums of one reduction, with four axes or three."""
        match reduction:
            case LogSumExp():
                return (self.rows.logsumexp,)
            case MaxScore():
                return (self.rows.maximum,)
            case Entropy():
                return (self.rows.entropy,)
            case NormalizedEntropy():
                assert self.rows.entropy is not None
                return (reduction.normalized(self.rows.entropy, self.visible_keys),)
            case Sum(dim=-1):
                return (self.rows.mass,)
            case Sum():
                return (self.column_sums,)
            case TopK(k):
                return tuple(each[..., :k].contiguous() for each in self.largest)
            case Diagonal(offset):
                rows = _rows_on(offset, self.source.shape)
                return (self.on_diagonals[..., rows, self.offsets.index(offset)],)
            case Window():
                return (self._columns_of(reduction),)
            case TransposedOutput(operand):
                across = _four_axes(operand, self.launch.given.shape)
                return (self.launch.transposed_product(self.rows.norms, across),)
            case Pool() | Segments():
                return (self._mass(reduction),)
            case _:
                raise AssertionError(f"{reduction} is refused")

    def backward(self, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``tensors``, from those of the raw answers."""
        from regard.backends.triton.derivatives import Derivatives

        others = [r.source.dtype for r in self.reductions if isinstance(r, Divergence)]
        factor = _power_for_half([self.source.dtype, *others], arriving)
        of_answers = iter(arriving)
        derivatives: Derivatives | None = None
        by_id: dict[int, Tensor] = {}
        divergences = iter(self.divergences)
        for reduction in self.reductions:
            numbers = next(of_answers)
            if isinstance(reduction, TopK):
                next(of_answers)  # of the indices
            compared = next(divergences) if isinstance(reduction, Divergence) else None
            if numbers is None:
                continue
            # One number may arrive for all entries, without memory of their own; kernels read it.
            numbers = (numbers if factor is None else numbers * factor).contiguous()
            numbers = numbers.view(*self.launch.given.shape[:2], *self._last_axes(numbers))
            if isinstance(reduction, Divergence) and compared is not None:
                self._add_divergence(by_id, reduction, *compared, numbers)
            else:
                derivatives = derivatives or Derivatives(self.launch, self.rows)
                self._add(derivatives, reduction, numbers)
        if derivatives is not None:
            self._add_gradients(by_id, derivatives)
        if factor is not None:
            by_id = {name: gradient / factor for name, gradient in by_id.items()}
        return [by_id.get(id(each)) for each in tensors_of(self.source, self.reductions)]

    def _add(self, derivatives: "Derivatives", reduction: Reduction, numbers: Tensor) -> None:
        """Add the derivative by the raw answer of a reduction of this matrix alone."""
        match reduction:
            case LogSumExp():
                derivatives.add_logsumexp(numbers)
            case MaxScore():
                assert self.rows.maximum is not None
                keys = self.largest[1][..., :1]
                derivatives.add_scores(keys, self.rows.maximum[..., None], numbers[..., None])
            case Entropy():
                derivatives.add_entropy(numbers)
            case NormalizedEntropy():
                assert self.rows.entropy is not None
                with torch.enable_grad():
                    entropy = self.rows.entropy.detach().requires_grad_()
                    answer = reduction.normalized(entropy, self.visible_keys)
                derivatives.add_entropy(*torch.autograd.grad(answer, entropy, numbers))
            case Sum(dim=-1):
                derivatives.add_row_sums(numbers)
            case Sum():
                derivatives.add_column_sums(numbers)
            case TopK(k):
                values, keys = (each[..., :k] for each in self.largest)
                derivatives.add_weights(keys, values, numbers)
            case Diagonal(offset):
                rows = _rows_on(offset, self.source.shape)
                weights = self.on_diagonals[..., self.offsets.index(offset), None]
                across = torch.zeros_like(weights)
                across[..., rows, 0] = numbers
                queries = torch.arange(weights.shape[-2], device=weights.device)[:, None]
                derivatives.add_weights(_where_seen(queries + offset, weights), weights, across)
            case Window(_, at_columns):
                weights = self._columns_of(reduction)
                keys = torch.tensor(at_columns, device="cpu").to(weights.device, non_blocking=True)
                derivatives.add_weights(_where_seen(keys, weights), weights, numbers)
            case TransposedOutput(operand):
                across = _four_axes(operand, self.launch.given.shape)
                derivatives.add_product(id(operand), across, numbers)
            case Pool() | Segments():
                derivatives.add_grid(*spans_of(reduction, self.source.shape), numbers)
            case _:
                raise AssertionError(f"{reduction} is refused")

    def _columns_of(self, window: Window) -> Tensor:
        each = self.in_columns.unbind(-1)  # a list as an index makes the CPU wait
        return torch.stack([each[self.columns.index(key)] for key in window.at_columns], -1)

    def _last_axes(self, numbers: Tensor) -> torch.Size:
        return numbers.shape[len(self.source.shape) - 2 :]

    def _add_divergence(
        self,
        by_id: dict[int, Tensor],
        reduction: Divergence,
        other: "Request",
        answers: "_Divergences",
        numbers: Tensor,
    ) -> None:
        """Add the gradients of both matrices of a divergence."""
        from regard.backends.triton.derivatives import Derivatives

        # An infinite divergence is a constant.
        constant = answers.numbers == torch.inf
        numbers, found = numbers.masked_fill(constant, 0), answers.numbers.masked_fill(constant, 0)
        first, second = found, found
        kinds: tuple[DivergenceKind, DivergenceKind] = ("kullback_leibler", "second")
        if isinstance(reduction, JensenShannon):
            assert answers.half is not None
            numbers, kinds = numbers / 2, ("jensen_shannon", "jensen_shannon")
            first, second = answers.half, 2 * found - answers.half
        mass = self.rows.mass
        assert mass is not None
        beside_self, beside_other = other.beside(numbers, kinds[0]), self.beside(numbers, kinds[1])
        pairs = ((self, beside_self, first), (other, beside_other, second))
        for matrix, beside, its_answers in pairs:
            derivatives = Derivatives.of_divergence(
                matrix.launch, matrix.rows, beside, its_answers, mass
            )
            matrix._add_gradients(by_id, derivatives)

    def beside(self, numbers: Tensor, kind: DivergenceKind) -> OtherMatrix:
        """Return this matrix as the other one of a divergence."""
        norms = self.rows.norms
        return OtherMatrix(self.launch.given, (norms.top, norms.above), numbers, kind)

    def _add_gradients(self, by_id: dict[int, Tensor], derivatives: "Derivatives") -> None:
        """Add the gradients of the matrix, by the ids of its tensors, in their shapes."""
        source = self.source

        def add(name: int, gradient: Tensor) -> None:  # one tensor may be several
            by_id[name] = by_id[name] + gradient if name in by_id else gradient

        if source.query.requires_grad:
            query = derivatives.query_gradient() * query_factor(source)
            add(id(source.query), query.view(source.query.shape))
        if source.key.requires_grad:
            add(id(source.key), derivatives.key_gradient().view(source.key.shape))
        if source.sink_bias is not None and source.sink_bias.requires_grad:
            of_sink = derivatives.sink_gradient().reshape(*source.shape[:-2], 1, 1)
            add(id(source.sink_bias), of_sink.sum_to_size(source.sink_bias.shape))
        if source.bias is not None and source.bias.requires_grad:
            size = torch.Size((1,) * (4 - source.bias.ndim) + source.bias.shape)
            add(id(source.bias), derivatives.bias_gradient(size).view(source.bias.shape))
        for tensor, gradient in _of_positions(source, derivatives, self.launch.given.shape):
            add(id(tensor), gradient)
        for name, gradient in derivatives.operand_gradients():
            operand = next(each for r in self.reductions for each in r.tensors if id(each) == name)
            gradient = gradient.reshape(*source.shape[:-1], gradient.shape[-1])
            gradient = gradient.squeeze(-1) if operand.ndim == 1 else gradient
            add(name, _grouped(gradient, operand.shape))


def _of_positions(
    source: QueryKeyScores, derivatives: "Derivatives", shape: torch.Size
) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the tensors of a position bias that need a gradient, each with its own."""
    bias = source.position_bias
    leaves = [] if bias is None else [each for each in bias.tensors if each.requires_grad]
    if bias is None or not leaves:
        return ()
    with torch.enable_grad():
        numbers = position_numbers(bias, shape, source.device)
    arriving = derivatives.bias_gradient(None).sum_to_size(numbers.shape)
    # With ``materialize_grads``, a tensor that no number depends on has a gradient of zeros.
    gradients = torch.autograd.grad(numbers, leaves, arriving, materialize_grads=True)
    return list(zip(leaves, gradients, strict=True))


class _Divergences(NamedTuple):
    """The answers of one divergence.

    Attributes:
        numbers: the divergence of each row, (batch, num_heads, q_len).
        half: of Jensen-Shannon the sum of p log(p/m), with p the weights of the first matrix.
    """

    numbers: Tensor
    half: Tensor | None


class _RowNumbers(NamedTuple):
    """The numbers of the rows of a matrix that ``Divergence.combine`` reads."""

    maximum: Tensor
    log_normalizer: Tensor
    row_sum: Tensor
    mean_shifted: Tensor

    @classmethod
    def of(cls, rows: "RowStatistics") -> "_RowNumbers":
        assert rows.mass is not None
        log_normalizer = rows.norms.above * log(2)
        entropy = torch.zeros_like(log_normalizer) if rows.entropy is None else rows.entropy
        shifted = log_normalizer * rows.mass - entropy
        return cls(rows.norms.top[..., None], log_normalizer, rows.mass, shifted)


def _power_for_half(
    dtypes: Sequence[torch.dtype], arriving: Sequence[Tensor | None]
) -> Tensor | None:
    """Return a power of 2 that brings float16 gradients to about 64; None for other dtypes.

    A kernel rounds the derivatives by scores to the dtype of the query, and those of the mean of an
    answer would be 0 in float16. Gradients are linear in what arrives, so the power is exact.
    """
    sizes = [each.abs().max() for each in arriving if each is not None]
    if torch.float16 not in dtypes or not sizes:
        return None
    size = torch.stack([each.double() for each in sizes]).max()
    power = torch.exp2(6 - size.log2().floor()).float()
    return torch.where((size > 0) & power.isfinite(), power, 1.0)


class _Grids(NamedTuple):
    """The mass of parts of the rows on strips of keys, from which all grids are added up.

    Attributes:
        parts: (start, stop) of the queries of each part, (parts, 2), on the CPU.
        strip: keys of a strip.
        strips: (batch, num_heads, parts, strips).
    """

    parts: Tensor
    strip: int
    strips: Tensor

    @classmethod
    def by_strips(
        cls,
        launch: "Launch",
        rows: "RowStatistics",
        grids: Sequence[Pool | Segments],
        *,
        sums: bool,
    ) -> "_Grids | None":
        """Run the pass; return None where parts are too short, or the strips too many.

        Args:
            launch: of the matrix.
            rows: its row statistics.
            grids: whose mass is asked.
            sums: whether the column sums are asked, too; strips of one key give them.
        """
        from regard.backends.triton.launch import (  # imports triton
            STRIPS,
            parts_of,
            spans_between,
        )

        *leading, q_len, kv_len = launch.given.shape
        spans = [spans_of(grid, launch.given.shape) for grid in grids]
        all_rows = torch.tensor([0, q_len], device="cpu")
        parts = spans_between(torch.cat((all_rows, *(down.flatten() for down, _ in spans))))
        if int(parts.diff().min()) < launch.shortest_part:
            return None
        parts = parts_of(parts, launch.longest_part)
        columns = torch.cat([across.flatten() for _, across in spans])
        whole = [n for n in STRIPS if not bool((columns[columns < kv_len] % n).any())]

        def count(strip: int) -> int:
            return torch.Size(leading).numel() * len(parts) * -(-kv_len // strip)

        strip = 1 if sums and count(1) <= MOST_STRIPS else max(whole)
        if count(strip) > MOST_STRIPS:
            return None
        return cls(parts, strip, launch.strips(rows.norms, parts, strip))

    def mass(self, launch: "Launch", down: Tensor, across: Tensor) -> Tensor:
        """Return the mass of each span of queries on each span of keys."""
        begins = torch.searchsorted(self.parts[:, 0].contiguous(), down[:, 0].contiguous())
        ends = torch.searchsorted(self.parts[:, 1].contiguous(), down[:, 1].contiguous()) + 1
        columns = -(-across // self.strip)  # only the end of the keys lies inside a strip
        return launch.added(self.strips, torch.stack((begins, ends), -1), columns)


def _rows_on(offset: int, shape: torch.Size) -> slice:
    """Return the queries whose key at an offset exists."""
    q_len, kv_len = shape[-2:]
    return slice(min(max(0, -offset), q_len), max(0, min(q_len, kv_len - offset)))


def _where_seen(keys: Tensor, weights: Tensor) -> Tensor:
    """Return the keys of some weights, and -1 for weights of 0, which have no gradient."""
    return keys.expand(weights.shape).masked_fill(weights == 0, -1)


def _grouped(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient of (..., num_heads, q_len, width) over what the operand's axes share."""
    if len(shape) == 1:
        return gradient.reshape(-1, shape[0]).sum(0)
    if len(shape) > 2 and 1 < shape[-3] < gradient.shape[-3]:
        *batch, heads, length, width = gradient.shape
        groups = (*batch, shape[-3], heads // shape[-3], length, width)
        gradient = gradient.reshape(groups).sum(-3)
    return gradient.sum_to_size(shape)


def _four_axes(operand: Tensor, shape: torch.Size) -> Tensor:
    """Return the operand as (batch, heads, q_len, width), with its grouped heads."""
    if operand.ndim == 1:
        operand = operand[:, None]
    operand = operand[(None,) * (len(shape) - operand.ndim)]
    operand = operand.expand(shape[0], *operand.shape[1:])
    return operand if operand.stride(-1) == 1 else operand.contiguous()


def spans_of(reduction: Pool | Segments, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return (start, stop) of the spans of queries, and of the spans of keys."""
    segments = reduction.grid(shape) if isinstance(reduction, Pool) else reduction
    return torch.tensor(segments.query_pieces, device="cpu"), segments.key_edges


def tensors_of(source: QueryKeyScores, reductions: Sequence[Reduction]) -> tuple[Tensor, ...]:
    """Return all tensors that gradients flow to, each once."""
    extra = [tensor for reduction in reductions for tensor in reduction.tensors]
    return tuple({id(each): each for each in (*source.tensors, *extra)}.values())
