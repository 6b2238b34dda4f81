"""The numbers that reductions of one matrix need, and their gradients, by the Triton kernels."""

from collections.abc import Callable, Collection, Mapping, Sequence
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
from regard.backends.triton.whole_matrix import Answer
from regard.masks import Mask
from regard.reductions.divergences import Divergence, JensenShannon
from regard.reductions.needs import Needs
from regard.reductions.sums import Spans, SumsOfRows
from regard.scores.box import int_tensor
from regard.scores.query_key import QueryKeyScores

if TYPE_CHECKING:
    from regard.backends.triton.derivatives import Derivatives
    from regard.backends.triton.launch import Launch, RowStatistics

Kept = tuple[str, int]
"""The name of a number, and its matrix: 0 for that of the request, 1 for its first divergence's."""

MOST_SUMS = 2**26  # numbers between two passes: 256 MiB
_LN2 = log(2)


@dataclass(frozen=True, eq=False)
class Request:
    """The numbers of one matrix that reductions need; each pass runs once, when it is needed.

    An answer is addressed by its name, which is one of ``Needs`` or of ``RowStatistics``, and its
    position among the answers of this name.
    """

    source: QueryKeyScores
    mask: Mask | None
    needs: Needs
    graded: bool
    kept: dict[Kept, Tensor]  # numbers of the forward pass, in the backward pass

    @cached_property
    def launch(self) -> "Launch":
        from regard.backends.triton.launch import Launch  # imports triton

        return Launch(operands(self.source, self.mask, self.kept_here))

    @cached_property
    def kept_here(self) -> dict[str, Tensor]:
        """The numbers of this matrix in ``kept``."""
        return {name: each for (name, matrix), each in self.kept.items() if matrix == 0}

    @property
    def numbers(self) -> dict[Kept, Tensor]:
        """The numbers of the forward pass that the backward pass reads."""
        rows, packed = self.rows, self.launch.given.limits.packed
        numbers: dict[str, Tensor | None] = {
            "logsumexp": rows.logsumexp,
            "top": rows.norms.top,
            "above": rows.norms.above,
            "maximum": rows.maximum,
            "mass": rows.mass,
            "mean_shifted": rows.mean_shifted,
        }
        if self.largest_k:
            numbers["weights"], numbers["keys"] = self.largest
        if self.needs.offsets:
            numbers["on_diagonals"] = self.on_diagonals
        if self.needs.tiles:
            numbers["in_columns"] = self.in_columns
        if packed is not None:
            numbers["slots"], numbers["words"] = packed.slots, packed.words
        of_matrices: list[dict[str, Tensor | None]] = [numbers]
        for other, answers in self.divergences:
            names = {name: each for (name, _), each in other.numbers.items()}
            of_matrices.append({**names, "divergence": answers.numbers, "half": answers.half})
        return {
            (name, matrix): tensor
            for matrix, numbers in enumerate(of_matrices)
            for name, tensor in numbers.items()
            if tensor is not None
        }

    @cached_property
    def divergences(self) -> "list[tuple[Request, _Divergences]]":
        """The other matrix of each divergence, and its answers."""
        pairs: list[tuple[Request, _Divergences]] = []
        for number, divergence in enumerate(self.needs.divergences, 1):
            kept = {(name, 0): each for (name, of), each in self.kept.items() if of == number}
            source = cast(QueryKeyScores, divergence.source)
            compared = Request(source, divergence.mask, Needs(), self.graded, kept)
            if kept:
                answers = _Divergences(kept["divergence", 0], kept.get(("half", 0)))
            else:
                answers = self._diverge(divergence, compared)
            pairs.append((compared, answers))
        return pairs

    def _diverge(self, divergence: Divergence, other: "Request") -> "_Divergences":
        symmetric = isinstance(divergence, JensenShannon)
        kind = "jensen_shannon" if symmetric else "kullback_leibler"
        beside = other.beside(self.rows.logsumexp, kind)  # the numbers are not read
        totals, of_first = self.launch.divergence(
            self.rows.norms, beside, shares=symmetric and self.graded
        )
        of_self, of_other = (_RowNumbers.of(each.rows) for each in (self, other))
        numbers = divergence.combine(of_self, of_other, totals)
        return _Divergences(numbers, of_first)

    @cached_property
    def rows(self) -> "RowStatistics":
        if self.kept:
            from regard.backends.triton.launch import RowStatistics  # imports triton
            from regard.backends.triton.tile import Norms

            kept = self.kept_here
            norms = Norms(kept["top"], kept["above"])
            first = kept["logsumexp"], norms, kept["maximum"], kept["mass"]
            return RowStatistics(*first, kept.get("mean_shifted"))
        return self.launch.rows(mean_shifted=self.needs.mean_shifted, k=self.largest_k)

    @cached_property
    def largest_k(self) -> int:
        """The number of largest weights that are listed for each row.

        The gradient of the largest score goes to its key, which the forward pass finds.
        """
        return max(self.needs.k, int(self.graded and self.needs.largest_score))

    @cached_property
    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weights and their keys, (batch, num_heads, q_len, largest_k)."""
        if self.kept:
            return self.kept_here["weights"], self.kept_here["keys"]
        return self.launch.top(self.rows, self.largest_k)

    @cached_property
    def on_diagonals(self) -> Tensor:
        """The weights at each offset, (batch, num_heads, q_len, offsets); 0 outside the matrix."""
        if "on_diagonals" in self.kept_here:
            return self.kept_here["on_diagonals"]
        return self.launch.entries(self.rows.norms, self.needs.sorted_offsets, diagonal=True)

    @cached_property
    def in_columns(self) -> Tensor:
        """The weights in each column, (batch, num_heads, q_len, columns)."""
        if "in_columns" in self.kept_here:
            return self.kept_here["in_columns"]
        return self.launch.entries(self.rows.norms, self.needs.columns, diagonal=False)

    @cached_property
    def grids(self) -> "_Grids | None":
        """The mass of all cells by one pass over the columns, if that can be."""
        spans = [each.spans(self.source.shape) for each in self.needs.sums]
        cells = [_tensors(down, across) for down, across in spans if across is not None]
        if not cells:
            return None
        return _Grids.by_tiles(self.launch, self.rows, cells, by_key=len(cells) < len(spans))

    def _sums(self, of: SumsOfRows) -> Tensor:
        """Return the mass of cells, (batch, num_heads, spans of queries, spans of keys).

        Sums over all queries have no third axis.
        """
        down, across = of.spans(self.source.shape)
        if across is not None:
            cells = _tensors(down, across)
            if self.grids is not None:
                return self.grids.mass(self.launch, *cells)
            return self.launch.spans(self.rows.norms, *cells)
        if self.grids is not None and self.grids.keys == 1:
            from regard.backends.triton.launch import joined_parts  # imports triton

            return joined_parts(self.grids.sums)
        return self.launch.column_sums(self.rows.norms)

    def forward(self, between: Callable[[], None]) -> dict[Answer, Tensor]:
        """Return all answers, with the axes of the matrix.

        Args:
            between: called when the kernels of some of them have been launched.
        """
        rows, needs, norms = self.rows, self.needs, self.rows.norms
        answers = {"logsumexp": [rows.logsumexp], "maximum": [rows.maximum], "row_sum": [rows.mass]}
        if rows.mean_shifted is not None:
            answers |= {"mean_shifted": [rows.mean_shifted], "log_normalizer": [norms.above * _LN2]}
        between()
        if needs.k:
            weights, keys = (each[..., : needs.k] for each in self.largest)
            answers |= {"weights": [weights], "keys": [keys]}
        if needs.offsets:
            answers["diagonals"] = [self.on_diagonals]
        if needs.tiles:
            answers["columns"] = [self.in_columns]
        if needs.keys:
            answers["visible_keys"] = [self.launch.visible_keys(norms)]
        between()
        answers["sums"] = [self._sums(each) for each in needs.sums]
        between()
        across = [_four_axes(each, self.launch.given.shape) for each in needs.operands]
        answers["operands"] = [self.launch.transposed_product(norms, each) for each in across]
        answers["divergences"] = [divergence.numbers for _, divergence in self.divergences]
        between()
        leading = self.source.shape[:-2]
        return {
            (name, position): each.reshape(*leading, *each.shape[2:])
            for name, several in answers.items()
            for position, each in enumerate(several)
        }

    def backward(self, arriving: Mapping[Answer, Tensor]) -> dict[int, Tensor]:
        """Return the gradients of tensors by their ids, given those of some answers."""
        from regard.backends.triton.derivatives import Derivatives

        others = [each.source.dtype for each in self.needs.divergences]
        factor = _power_for_half([self.source.dtype, *others], arriving.values())
        derivatives: Derivatives | None = None
        by_id: dict[int, Tensor] = {}
        for (name, position), gradient in arriving.items():
            # One number may arrive for all entries, without memory of its own; kernels read it.
            numbers = (gradient if factor is None else gradient * factor).contiguous()
            last_axes = numbers.shape[len(self.source.shape) - 2 :]
            numbers = numbers.view(*self.launch.given.shape[:2], *last_axes)
            if name == "divergences":
                self._add_divergence(by_id, position, numbers)
            else:
                derivatives = derivatives or Derivatives(self.launch, self.rows)
                self._add(derivatives, (name, position), numbers)
        if derivatives is not None:
            self._add_gradients(by_id, derivatives)
        if factor is not None:
            by_id = {tensor: gradient / factor for tensor, gradient in by_id.items()}
        return by_id

    def _add(self, derivatives: "Derivatives", answer: Answer, numbers: Tensor) -> None:
        """Add the derivative by an answer of this matrix alone."""
        name, position = answer
        match name:
            case "logsumexp" | "log_normalizer":  # the maximum is a constant
                derivatives.add_logsumexp(numbers)
            case "mean_shifted":
                derivatives.add_mean_shifted(numbers)
            case "row_sum":
                derivatives.add_row_sums(numbers)
            case "maximum":
                keys = self.largest[1][..., :1]
                derivatives.add_scores(keys, self.rows.maximum[..., None], numbers[..., None])
            case "weights":
                values, keys = (each[..., : self.needs.k] for each in self.largest)
                derivatives.add_weights(keys, values, numbers)
            case "diagonals":
                weights = self.on_diagonals
                queries = torch.arange(weights.shape[-2], device=weights.device)
                keys = queries[:, None] + int_tensor(self.needs.sorted_offsets, weights.device)
                derivatives.add_weights(_where_seen(keys, weights), weights, numbers)
            case "columns":
                weights = self.in_columns
                keys = int_tensor(self.needs.columns, weights.device)
                derivatives.add_weights(_where_seen(keys, weights), weights, numbers)
            case "sums":
                down, across = self.needs.sums[position].spans(self.source.shape)
                if across is None:
                    derivatives.add_column_sums(numbers)
                else:
                    derivatives.add_grid(*_tensors(down, across), numbers)
            case _:
                operand = self.needs.operands[position]
                across = _four_axes(operand, self.launch.given.shape)
                derivatives.add_product(id(operand), across, numbers)

    def _add_divergence(self, by_id: dict[int, Tensor], position: int, numbers: Tensor) -> None:
        """Add the gradients of both matrices of a divergence."""
        from regard.backends.triton.derivatives import Derivatives

        other, answers = self.divergences[position]
        # An infinite divergence is a constant.
        constant = answers.numbers == torch.inf
        numbers, values = numbers.masked_fill(constant, 0), answers.numbers.masked_fill(constant, 0)
        first, second = values, values
        kinds: tuple[DivergenceKind, DivergenceKind] = ("kullback_leibler", "second")
        if isinstance(self.needs.divergences[position], JensenShannon):
            assert answers.half is not None
            numbers, kinds = numbers / 2, ("jensen_shannon", "jensen_shannon")
            first, second = answers.half, 2 * values - answers.half
        mass = self.rows.mass
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
        for tensor, gradient in _of_positions(source, derivatives):
            add(id(tensor), gradient)
        for name, gradient in derivatives.operand_gradients():
            operand = next(each for each in self.needs.operands if id(each) == name)
            gradient = gradient.reshape(*source.shape[:-1], gradient.shape[-1])
            gradient = gradient.squeeze(-1) if operand.ndim == 1 else gradient
            add(name, _grouped(gradient, operand.shape))


def _of_positions(
    source: QueryKeyScores, derivatives: "Derivatives"
) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the tensors of a position bias that need a gradient, each with its own."""
    bias = source.position_bias
    leaves = [] if bias is None else [each for each in bias.tensors if each.requires_grad]
    if bias is None or not leaves:
        return ()
    with torch.enable_grad():
        numbers = position_numbers(source, bias)
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
    row_sum: Tensor

    @classmethod
    def of(cls, rows: "RowStatistics") -> "_RowNumbers":
        return cls(rows.norms.top[..., None], rows.mass)


def _power_for_half(dtypes: Sequence[torch.dtype], arriving: Collection[Tensor]) -> Tensor | None:
    """Return a power of 2 that brings float16 gradients to about 64; None for other dtypes.

    A kernel rounds the derivatives by scores to the dtype of the query, and those of the mean of an
    answer would be 0 in float16. Gradients are linear in what arrives, so the power is exact.
    """
    sizes = [each.abs().max() for each in arriving]
    if torch.float16 not in dtypes or not sizes:
        return None
    size = torch.stack([each.double() for each in sizes]).max()
    power = torch.exp2(6 - size.log2().floor()).float()
    return torch.where((size > 0) & power.isfinite(), power, 1.0)


class _Grids(NamedTuple):
    """The mass of tiles, parts of the rows by some keys, from which all grids are added up.

    Attributes:
        parts: (start, stop) of the queries of each part, (parts, 2), on the CPU.
        keys: the number of keys of a tile.
        sums: (batch, num_heads, parts, tiles).
    """

    parts: Tensor
    keys: int
    sums: Tensor

    @classmethod
    def by_tiles(
        cls,
        launch: "Launch",
        rows: "RowStatistics",
        cells: Sequence[tuple[Tensor, Tensor]],
        *,
        by_key: bool,
    ) -> "_Grids | None":
        """Run the pass; return None where parts are too short, or the tiles too many.

        Args:
            launch: of the matrix.
            rows: its row statistics.
            cells: (start, stop) of the spans of queries, and of keys, of each grid.
            by_key: whether the column sums are asked, too; tiles of one key give them.
        """
        from regard.backends.triton.launch import (  # imports triton
            KEYS_AT_ONCE,
            parts_of,
            spans_between,
        )

        *leading, q_len, kv_len = launch.given.shape
        all_rows = torch.tensor([0, q_len], device="cpu")
        parts = spans_between(torch.cat((all_rows, *(down.flatten() for down, _ in cells))))
        if int(parts.diff().min()) < launch.shortest_part:
            return None
        parts = parts_of(parts, launch.longest_part)
        columns = torch.cat([across.flatten() for _, across in cells])
        steps = [n for n in KEYS_AT_ONCE if not bool((columns[columns < kv_len] % n).any())]

        def count(keys: int) -> int:
            return torch.Size(leading).numel() * len(parts) * -(-kv_len // keys)

        keys = 1 if by_key and count(1) <= MOST_SUMS else max(steps)
        if count(keys) > MOST_SUMS:
            return None
        return cls(parts, keys, launch.tile_sums(rows.norms, parts, keys))

    def mass(self, launch: "Launch", down: Tensor, across: Tensor) -> Tensor:
        """Return the mass of each span of queries on each span of keys."""
        begins = torch.searchsorted(self.parts[:, 0].contiguous(), down[:, 0].contiguous())
        ends = torch.searchsorted(self.parts[:, 1].contiguous(), down[:, 1].contiguous()) + 1
        columns = -(-across // self.keys)  # only the end of the keys lies inside a tile
        return launch.added(self.sums, torch.stack((begins, ends), -1), columns)


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


def _tensors(down: Spans, across: Spans) -> tuple[Tensor, Tensor]:
    """Return spans of queries and of keys as tensors on the CPU, (spans, 2) each."""
    return torch.tensor(down, device="cpu"), torch.tensor(across, device="cpu")
