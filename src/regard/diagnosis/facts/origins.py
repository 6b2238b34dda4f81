"""The origin of the numbers of a tensor: the first tensor of a run that holds all of them.

In float64 and on random inputs no two numbers of a run are equal by chance. So code that only moves
numbers (views, transposes, slices, copies) can be read from the numbers alone: each element of a
tensor is looked up in the tensors before it. Its ``Coordinates`` are the sample and the token that
it belongs to, and its column in a projection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.inputs.tape import Step


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of a run.

    Attributes:
        batch: None without one.
        tokens: of each sample.
        is_token_first: tokens stand before samples in the inputs.
        positions: whole numbers of tokens that were passed, (tokens) or (batch, tokens).
        memory: the number of tokens that are attended to; None if there are as many.
    """

    batch: int | None
    tokens: int
    is_token_first: bool = False
    positions: tuple[Tensor, ...] = ()
    memory: int | None = None


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The sample, the token and the column of each element of a tensor, integers of its shape.

    Attributes:
        sample: from 0; all 0 without a batch.
        token: from 0.
        column: the index in all other axes together, from 0.
    """

    sample: Tensor
    token: Tensor
    column: Tensor

    def at(self, index: Tensor) -> "Coordinates":
        """Return the coordinates of the elements with flat indices, in the shape of these."""
        return Coordinates(*(t.flatten()[index] for t in (self.sample, self.token, self.column)))

    def reshape(self, *shape: int) -> "Coordinates":
        return Coordinates(*(t.reshape(shape) for t in (self.sample, self.token, self.column)))


@dataclass(frozen=True, eq=False)
class Origin:
    """A tensor that holds all numbers of another one.

    Attributes:
        at: the index of the step that gave it; -1 for an input.
        name: that of the input; "" for a step.
        tensor: the one that holds them.
        index: the flat index in it of each element, of the other tensor's shape.
    """

    at: int
    name: str
    tensor: Tensor
    index: Tensor


class Numbers:
    """The numbers of a run, sorted, with the tensors that hold them.

    Args:
        inputs: of the run, by name.
        steps: of the run.
    """

    def __init__(self, inputs: Mapping[str, Tensor], steps: Sequence[Step]) -> None:
        self.steps = steps
        self._tensors: list[tuple[int, str, Tensor]] = [
            (-1, name, t) for name, t in inputs.items() if t.is_floating_point()
        ]
        for at, step in enumerate(steps):
            self._tensors += [(at, "", t) for t in map(_real, step.outputs) if t is not None]
        flat = [t.flatten() for _, _, t in self._tensors]
        if not flat:
            flat = [torch.zeros(0, dtype=torch.float64)]
        # A binary search would go wrong at NaN. Only finite numbers are looked for.
        self._values, order = _without_nan(torch.cat(flat).double()).sort(stable=True)
        counts = torch.tensor([t.numel() for t in flat])
        owners = torch.repeat_interleave(torch.arange(len(flat)), counts)
        self._owners = owners[order]
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}

    def origin(self, tensor: Tensor, *, before: int | None = None) -> Origin | None:
        """Return the first tensor that holds all numbers of another one; None without one.

        Args:
            tensor: the other one.
            before: the number of a step that all steps must precede.
        """
        numbers = tensor.detach().double().contiguous()
        if not numbers.numel() or not bool(numbers.isfinite().all()):
            return None
        # A number that seldom occurs has the fewest owners.
        probe = numbers.flatten()[numbers.numel() // 2]
        first = torch.searchsorted(self._values, probe, right=False)
        last = torch.searchsorted(self._values, probe, right=True)
        for owner in cast(list[int], self._owners[first:last].unique().tolist()):
            at, name, holder = self._tensors[owner]
            if before is not None and at >= before:
                break
            index = self._index(owner, numbers)
            if index is not None:
                return Origin(at, name, holder, index)
        return None

    def located(self, origin: Origin, sizes: Sizes) -> Coordinates | None:
        """Return the coordinates of all elements of an origin.

        Where its axes do not tell samples and tokens apart, the rows that it was made of do.
        """
        shape = origin.tensor.shape
        by_axes = located(shape, sizes)
        lengths = (sizes.tokens, sizes.memory or sizes.tokens)
        rows = [] if sizes.batch is None else [sizes.batch * length for length in lengths]
        if origin.at < 0 or (by_axes is not None and not {*rows} & {*shape}):
            return by_axes
        step = self.steps[origin.at]
        for tensor in step.inputs:
            if tensor.shape == shape:  # a bias is added
                before = self.origin(tensor, before=origin.at)
                coordinates = None if before is None else self.located(before, sizes)
                if before is not None and coordinates is not None:
                    return coordinates.at(before.index)
        return self._of_product(origin, step, sizes) or by_axes

    def _of_product(self, origin: Origin, step: Step, sizes: Sizes) -> Coordinates | None:
        """Return the coordinates of the product of rows (leading, rows, width) and parameters."""
        shape = origin.tensor.shape
        factors = [t for t in step.inputs if t.ndim == len(shape) and t.ndim in (2, 3)][-2:]
        if len(factors) != 2 or factors[0].shape[-1] != factors[1].shape[-2]:
            return None
        left, right = factors
        for rows, parameters, is_turned in ((left, right, False), (right, left, True)):
            before = self.origin(rows, before=origin.at)
            coordinates = None if before is None else self.located(before, sizes)
            if before is None or coordinates is None:
                continue
            index = before.index.mT if is_turned else before.index
            of_rows = coordinates.at(index[..., 0])
            sample, token = (
                t[..., None].expand(_turned(shape, is_turned))
                for t in (of_rows.sample, of_rows.token)
            )
            # A column is known by the first number of its parameters.
            first_numbers = parameters[..., 0] if is_turned else parameters[..., 0, :]
            flat = first_numbers.detach().double().flatten()
            distinct, column = cast(tuple[Tensor, Tensor], flat.unique(return_inverse=True))
            first = torch.full((len(distinct),), len(flat)).scatter_reduce(
                0, column, torch.arange(len(flat)), "amin"
            )
            column = first[column].reshape(first_numbers.shape)[..., None, :].expand(sample.shape)
            parts = (sample, token, column)
            return Coordinates(*(t.mT if is_turned else t for t in parts))
        return None

    def of_size(self, count: int, *, before: int) -> list[tuple[int, str, Tensor]]:
        """Return the tensors before a step that have as many numbers, in order."""
        return [
            (at, name, tensor)
            for at, name, tensor in self._tensors
            if at < before and tensor.numel() == count and tensor.is_floating_point()
        ]

    def _index(self, owner: int, numbers: Tensor) -> Tensor | None:
        """Return the flat index of numbers in a tensor; None if it does not hold all of them."""
        if owner not in self._sorted:
            holder = _without_nan(self._tensors[owner][2].detach().double().flatten())
            self._sorted[owner] = holder.sort(stable=True)
        values, order = self._sorted[owner]
        flat = numbers.flatten()
        place = torch.searchsorted(values, flat).clamp(max=len(values) - 1)
        if not bool((values[place] == flat).all()):
            return None
        return order[place].reshape(numbers.shape)


def rows_of_parameters(origin: Origin) -> Coordinates:
    """Return the coordinates of an origin whose rows are no tokens, such as learned queries.

    Equal rows, as where each sample has a copy of them, are one row.
    """
    numbers = origin.tensor.detach().double().contiguous()
    values, order = numbers.flatten().sort(stable=True)
    index = order[torch.searchsorted(values, numbers)]
    width = numbers.shape[-1]
    _, token = cast(tuple[Tensor, Tensor], (index // width).unique(return_inverse=True))
    return Coordinates(torch.zeros_like(token), token, index % width)


def _without_nan(numbers: Tensor) -> Tensor:
    return numbers.nan_to_num(torch.inf, torch.inf, -torch.inf)


def _turned(shape: Sequence[int], is_turned: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if is_turned else tuple(shape)


def _real(tensor: Tensor) -> Tensor | None:
    """Return a tensor of real numbers; None for one of other numbers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).flatten(-2)
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_nested:
        return None
    return tensor


def located(shape: Sequence[int], sizes: Sizes) -> Coordinates | None:
    """Return the coordinates of a tensor by the lengths of its axes.

    None where no axes are as long as there are tokens and samples. The lengths of a run are chosen
    so that no other axis has them.
    """
    axes = _axes(tuple(shape), sizes)
    if axes is None and sizes.memory is not None:
        return located(shape, replace(sizes, tokens=sizes.memory, memory=None))
    if axes is None:
        return None
    samples, tokens, is_turned = axes
    zeros = torch.zeros(tuple(shape), dtype=torch.int64)
    grids = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij") if shape else ()

    def index(axes: tuple[int, ...]) -> Tensor:
        total = zeros
        for axis in axes:
            total = total * shape[axis] + grids[axis]
        return total

    column = index(tuple(a for a in range(len(shape)) if a not in (*samples, *tokens)))
    if samples and samples == tokens:  # one axis for both
        row = index(tokens)
        inner = sizes.batch or 1 if is_turned else sizes.tokens
        outer, within = row // inner, row % inner
        sample, token = (within, outer) if is_turned else (outer, within)
        return Coordinates(sample, token, column)
    return Coordinates(index(samples), index(tokens), column)


def _axes(
    shape: tuple[int, ...], sizes: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], bool] | None:
    """Return the axes of samples and of tokens; the same where one axis has both."""
    batch, tokens = sizes.batch, sizes.tokens
    if batch is not None and batch * tokens in shape:
        axes = (shape.index(batch * tokens),)
        return axes, axes, sizes.is_token_first
    token = _axes_of_length(shape, tokens)
    if token is None:
        return None
    if batch is None:
        return (), token, False
    without_tokens = [1 if axis in token else n for axis, n in enumerate(shape)]
    if batch not in without_tokens:
        return None
    return (without_tokens.index(batch),), token, False


def _axes_of_length(shape: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    """Return the axis of a length, or two neighbours that have it together, as pixels do."""
    if length in shape:
        return (shape.index(length),)
    for axis, (first, second) in enumerate(pairwise(shape)):
        if first * second == length and 1 not in (first, second):
            return (axis, axis + 1)
    return None
