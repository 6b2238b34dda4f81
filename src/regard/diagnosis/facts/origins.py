"""Where the numbers of a tensor come from: the first tensor of a run that holds all of them.

In float64 and on random inputs no two numbers of a run are equal by chance. So code that only moves
numbers (views, transposes, slices, copies) can be read from the numbers alone: each element of a
tensor is looked up in the tensors before it. ``Coordinates`` say of each element which sample and
which token it belongs to, and in which column of a projection it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.trace import Step

__all__ = ["Coordinates", "Numbers", "Origin", "Sizes", "located"]


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of a run.

    Attributes:
        batch: None without one.
        tokens: of each sample.
        is_token_first: tokens stand before samples in the inputs.
        positions: whole numbers of tokens that were passed, (tokens) or (batch, tokens).
    """

    batch: int | None
    tokens: int
    is_token_first: bool = False
    positions: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Of each element of a tensor its sample, its token and its column, integers of its shape.

    Attributes:
        sample: from 0; all 0 without a batch.
        token: from 0.
        column: the place among the other axes, from 0.
    """

    sample: Tensor
    token: Tensor
    column: Tensor

    def at(self, index: Tensor) -> "Coordinates":
        """Return the coordinates of the elements at flat places."""
        own = (t.flatten()[index] for t in (self.sample, self.token, self.column))
        return Coordinates(*own)

    def reshape(self, *shape: int) -> "Coordinates":
        return Coordinates(*(t.reshape(shape) for t in (self.sample, self.token, self.column)))


@dataclass(frozen=True, eq=False)
class Origin:
    """A tensor that holds all numbers of another one.

    Attributes:
        at: the number of the step that gave it; -1 for an input.
        name: of the input; "" for a step.
        tensor: itself.
        index: the flat place in it of each element, of the other tensor's shape.
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
        self._values, order = torch.cat(flat).double().sort(stable=True)
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
        return next(iter(self.holders(tensor, before=before)), None)

    def holders(self, tensor: Tensor, *, before: int | None = None, most: int = 1) -> list[Origin]:
        """Return the first tensors that hold all numbers of another one."""
        wanted = tensor.detach().double().contiguous()
        if not wanted.numel() or not bool(wanted.isfinite().all()):
            return []
        # A number that seldom occurs has the fewest owners.
        probe = wanted.flatten()[wanted.numel() // 2]
        first = torch.searchsorted(self._values, probe, right=False)
        last = torch.searchsorted(self._values, probe, right=True)
        found: list[Origin] = []
        for owner in cast(list[int], self._owners[first:last].unique().tolist()):
            at, name, held = self._tensors[owner]
            if before is not None and at >= before:
                break
            index = self._index(owner, wanted)
            if index is not None:
                found.append(Origin(at, name, held, index))
                if len(found) == most:
                    break
        return found

    def located(self, origin: Origin, sizes: Sizes) -> Coordinates | None:
        """Return the coordinates of all elements of an origin.

        Where its axes do not tell samples and tokens apart, the rows that it was made of do.
        """
        shape = origin.tensor.shape
        found = located(shape, sizes)
        both = None if sizes.batch is None else sizes.batch * sizes.tokens
        if origin.at < 0 or (found is not None and both not in shape):
            return found
        step = self.steps[origin.at]
        for given in step.inputs:
            if given.shape == shape:  # a bias is added
                before = self.origin(given, before=origin.at)
                whole = None if before is None else self.located(before, sizes)
                if before is not None and whole is not None:
                    return whole.at(before.index.flatten()).reshape(*shape)
        return self._of_product(origin, step, sizes) or found

    def _of_product(self, origin: Origin, step: Step, sizes: Sizes) -> Coordinates | None:
        """Return the coordinates of the product of rows (leading, rows, width) and parameters."""
        shape = origin.tensor.shape
        pairs = [t for t in step.inputs if t.ndim == len(shape) and t.ndim in (2, 3)][-2:]
        if len(pairs) != 2 or pairs[0].shape[-1] != pairs[1].shape[-2]:
            return None
        for rows, other, is_turned in ((pairs[0], pairs[1], False), (pairs[1], pairs[0], True)):
            before = self.origin(rows, before=origin.at)
            place = None if before is None else self.located(before, sizes)
            if before is None or place is None:
                continue
            index = before.index.mT if is_turned else before.index
            at = place.at(index[..., 0])
            sample, token = (
                t[..., None].expand(_turned(shape, is_turned)) for t in (at.sample, at.token)
            )
            # A column is known by the first number of its parameters.
            names = other[..., 0] if is_turned else other[..., 0, :]
            flat = names.detach().double().flatten()
            known, column = cast(tuple[Tensor, Tensor], flat.unique(return_inverse=True))
            first = torch.full((len(known),), len(flat)).scatter_reduce(
                0, column, torch.arange(len(flat)), "amin"
            )
            column = first[column].reshape(names.shape)[..., None, :].expand(sample.shape)
            parts = (sample, token, column)
            return Coordinates(*(t.mT if is_turned else t for t in parts))
        return None

    def like(self, tensor: Tensor, *, before: int) -> list[tuple[int, str, Tensor]]:
        """Return the tensors before a step with as many numbers, in order."""
        return [
            (at, name, held)
            for at, name, held in self._tensors
            if at < before and held.numel() == tensor.numel() and held.is_floating_point()
        ]

    def _index(self, owner: int, wanted: Tensor) -> Tensor | None:
        if owner not in self._sorted:
            held = self._tensors[owner][2].detach().double().flatten()
            self._sorted[owner] = held.sort(stable=True)
        values, order = self._sorted[owner]
        place = torch.searchsorted(values, wanted.flatten())
        place = place.clamp(max=len(values) - 1)
        if not bool((values[place] == wanted.flatten()).all()):
            return None
        return order[place].reshape(wanted.shape)


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
    """Return which sample, token and column each element of a tensor has, by its axes' lengths.

    None where no axes are as long as there are tokens and samples. The lengths of a run are chosen
    so that no other axis has them.
    """
    axes = _axes(tuple(shape), sizes)
    if axes is None:
        return None
    samples, tokens, is_turned = axes
    count = prod(shape)
    place = torch.arange(count).reshape(tuple(shape))
    grids = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij") if shape else ()

    def number(own: tuple[int, ...]) -> Tensor:
        total = torch.zeros_like(place)
        for axis in own:
            total = total * shape[axis] + grids[axis]
        return total

    column = number(tuple(a for a in range(len(shape)) if a not in (*samples, *tokens)))
    if samples and samples == tokens:  # one axis for both
        both = number(tokens)
        inner = sizes.batch or 1 if is_turned else sizes.tokens
        outer, within = both // inner, both % inner
        sample, token = (within, outer) if is_turned else (outer, within)
        return Coordinates(sample, token, column)
    return Coordinates(number(samples), number(tokens), column)


def _axes(
    shape: tuple[int, ...], sizes: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], bool] | None:
    """Return the axes of samples and of tokens; the same where one axis has both."""
    batch, tokens = sizes.batch, sizes.tokens
    if batch is not None and batch * tokens in shape:
        own = (shape.index(batch * tokens),)
        return own, own, sizes.is_token_first
    token = _run(shape, tokens)
    if token is None:
        return None
    if batch is None:
        return (), token, False
    rest = tuple(1 if axis in token else n for axis, n in enumerate(shape))
    sample = (rest.index(batch),) if batch in rest else None
    return None if sample is None else (sample, token, False)


def _run(shape: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    """Return the axis of a length, or two neighbours that have it together, as pixels do."""
    if length in shape:
        return (shape.index(length),)
    for axis, (first, second) in enumerate(pairwise(shape)):
        if first * second == length and 1 not in (first, second):
            return (axis, axis + 1)
    return None
