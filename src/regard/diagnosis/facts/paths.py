"""The path from a projection, or an input, to the query, the key or the value of an attention.

A path is a list of operations on each token alone: a factor, a norm, a rotation by position. Each
of them is found by a relation between the numbers of two tensors, whatever operations the code
used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.origins import (
    Coordinates,
    Numbers,
    Origin,
    Sizes,
    located,
    rows_of_parameters,
)

_CLOSE = 1e-9
_MOST_OPERATIONS = 8  # on a path


@dataclass(frozen=True)
class Factor:
    """A number that all numbers are multiplied by, by the step ``at``."""

    factor: float
    at: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Norm:
    """Numbers divided by their root mean square (rms), length (l2) or standard deviation (layer).

    Attributes:
        kind: "rms", "l2" or "layer".
        width: the number of numbers that share one.
        at: the number of its last step.
    """

    kind: str
    width: int
    at: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Rotation:
    """Pairs of numbers turned by an angle that grows with the position.

    Attributes:
        pairing: "halves": i with i + part / 2; "neighbours": 2i with 2i + 1.
        part: the number of columns of a head that are turned.
        angles: those of a step of one token, in radians, (part / 2).
        start: the position of the first token.
        columns: the columns of the head that are a pair, (part / 2); None if they are unknown.
        at: the number of its last step.
    """

    pairing: str
    part: int
    angles: tuple[float, ...]
    start: float
    columns: tuple[tuple[int, int], ...] | None = field(default=None, compare=False)
    at: int = field(default=-1, compare=False)

    def moved(self, columns: Mapping[int, int]) -> "Rotation":
        """Return the rotation of a tensor that has each column at another index."""
        pairs = self.columns or ()
        if not pairs or not columns.keys() >= {column for pair in pairs for column in pair}:
            return replace(self, columns=None)
        return replace(self, columns=tuple((columns[a], columns[b]) for a, b in pairs))

    @property
    def base(self) -> float | None:
        """The number b of angles b^(-2i / part); None for other angles."""
        count = len(self.angles)
        if count < 2 or not all(angle > 0 for angle in self.angles):
            return None
        base = self.angles[1] ** -(self.part / 2)
        expected = [base ** (-2 * i / self.part) for i in range(count)]
        pairs = zip(self.angles, expected, strict=True)
        fits = all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12) for a, b in pairs)
        return base if fits else None


@dataclass(frozen=True)
class Part:
    """Several parts of the columns, each with a path of its own."""

    paths: tuple["Path", ...]


Operation = Factor | Norm | Rotation | Part


@dataclass(frozen=True, eq=False)
class Path:
    """The path to a tensor.

    Attributes:
        source: the index of the step of the projection, or the name of the input.
        operations: those from the source on; None if the path could not be read.
        line: the line of the step that could not be read; "" if all could.
        coordinates: those in the source of each element of the tensor; None if they are unknown.
        is_learned: it starts at parameters, whose rows are no tokens of a text.
    """

    source: int | str
    operations: tuple[Operation, ...] | None
    line: str
    coordinates: Coordinates | None = field(repr=False)
    is_learned: bool = False


def path_to(tensor: Tensor, numbers: Numbers, sizes: Sizes, *, before: int) -> Path:
    """Return the path to a tensor that a run held before a step."""
    return _path(tensor, numbers, sizes, before, _MOST_OPERATIONS)


def _path(tensor: Tensor, numbers: Numbers, sizes: Sizes, before: int, most: int) -> Path:
    origin = numbers.origin(tensor, before=before)
    if origin is None:
        return Path(-1, None, "", None)
    if origin.at < 0:
        coordinates = located(origin.tensor.shape, sizes)
        return Path(origin.name, (), "", _at(coordinates, origin.index))
    step = numbers.steps[origin.at]
    learned = rows_of_parameters(origin).at(origin.index) if not step.depends else None
    if step.projects and "norm" not in step.name:
        coordinates = learned or _at(numbers.located(origin, sizes), origin.index)
        return Path(origin.at, (), "", coordinates, learned is not None)
    if not most:
        return Path(origin.at, None, step.line, None)
    after = origin.tensor
    candidates = [
        (at, earlier, shape)
        for at, _, earlier in numbers.of_size(after.numel(), before=origin.at)
        if (shape := _common_shape(earlier.shape, after.shape)) is not None
        and not torch.equal(earlier.reshape(after.shape), after)
    ]
    # A factor first: with it, a norm of what is before it would look like one of other weights.
    for relation in (_times, _norm_or_turn):
        for at, earlier, shape in candidates:
            change = relation(earlier.reshape(shape), after.reshape(shape))
            if change is None:
                continue
            path = _path(earlier, numbers, sizes, at + 1, most - 1)
            if path.operations is None or path.coordinates is None:
                continue
            coordinates = path.coordinates.reshape(*shape)
            if isinstance(change, _Turned):
                change = change.rotation(coordinates, sizes.positions)
                if change is None:
                    continue
            operations = path.operations
            if earlier.shape != shape:  # its columns are other ones
                operations = _moved(operations, {})
            if not isinstance(change, _Cast):
                operations = (*operations, replace(change, at=origin.at))
            operations = _moved(operations, _columns_at(origin.index, shape[-1]))
            at = coordinates.at(origin.index)
            return Path(path.source, operations, "", at, path.is_learned)
    if learned is not None:
        return Path(origin.at, (), "", learned, is_learned=True)
    if step.name == "cat":
        return _path_of_parts(origin, numbers, sizes, most)
    return Path(origin.at, None, step.line, None)


def _common_shape(first: torch.Size, second: torch.Size) -> torch.Size | None:
    """Return the shape of two tensors, one of which may have pairs as an axis of their own."""
    for wide, split in ((first, second), (second, first)):
        if len(split) == len(wide) + 1 and split[-1] == 2 and split[:-2] == wide[:-1]:
            return wide
    return first if first == second else None


def _columns_at(index: Tensor, width: int) -> dict[int, int]:
    """Return where a tensor has each column of the one that holds its numbers, at a flat index."""
    row = cast(list[int], index.reshape(-1, index.shape[-1])[0].tolist())
    if len({at // width for at in row}) > 1:
        return {}
    return {at % width: column for column, at in enumerate(row)}


def _moved(operations: tuple[Operation, ...], columns: Mapping[int, int]) -> tuple[Operation, ...]:
    """Return operations with the columns of their rotations at other indices."""

    def moved(operation: Operation) -> Operation:
        if isinstance(operation, Rotation):
            return operation.moved(columns)
        if isinstance(operation, Part):
            parts = (
                replace(path, operations=_moved(path.operations or (), columns))
                for path in operation.paths
            )
            return Part(tuple(parts))
        return operation

    return tuple(map(moved, operations))


def _at(coordinates: Coordinates | None, index: Tensor) -> Coordinates | None:
    return None if coordinates is None else coordinates.at(index)


def _path_of_parts(origin: Origin, numbers: Numbers, sizes: Sizes, most: int) -> Path:
    """Return the path to a tensor that was put together of parts along its last axis."""
    at, tensor, step = origin.at, origin.tensor, numbers.steps[origin.at]
    pieces = [t for t in step.inputs if t.is_floating_point() and t.numel()]
    widths = [piece.shape[-1] for piece in pieces]
    if any(t.shape[:-1] != tensor.shape[:-1] for t in pieces) or sum(widths) != tensor.shape[-1]:
        return Path(at, None, step.line, None)
    paths: list[Path] = []
    coordinates: list[Coordinates] = []
    for part in cast(tuple[Tensor, ...], tensor.split(widths, -1)):
        path = _path(part, numbers, sizes, at, most - 1)
        if path.operations is None or path.coordinates is None or path.is_learned:
            return Path(at, None, path.line or step.line, None)
        first = sum(widths[: len(paths)])
        shifted = {column: first + column for column in range(part.shape[-1])}
        paths.append(replace(path, operations=_moved(path.operations, shifted)))
        coordinates.append(path.coordinates)
    names = ("sample", "token", "column")
    joined = Coordinates(
        *(torch.cat([getattr(c, name) for c in coordinates], -1) for name in names)
    )
    columns = _columns_at(origin.index, tensor.shape[-1])
    operations = _moved((Part(tuple(paths)),), columns)
    return Path(paths[0].source, operations, "", joined.at(origin.index))


@dataclass(frozen=True, eq=False)
class _Turned:
    """Pairs of numbers that kept their length: a rotation, if the angles follow the positions."""

    pairing: str
    part: int
    angles: Tensor  # (..., part / 2)

    def rotation(self, coordinates: Coordinates, tables: Sequence[Tensor]) -> Rotation | None:
        """Return the rotation if each angle is one step's angle times the position.

        The position is the index of the token, or the number that one of the tables has for it.
        """
        half = self.part // 2
        first = slice(0, half) if self.pairing == "halves" else slice(0, self.part, 2)
        width = self.angles.shape[-1]
        sample, token = (
            index[..., first].reshape(-1, width)
            for index in (coordinates.sample, coordinates.token)
        )
        for table in (None, *tables):
            position = token
            if table is not None:
                rows = table.reshape(-1, table.shape[-1])
                position = rows[sample if len(rows) > 1 else torch.zeros_like(sample), token]
            rotation = self._by(position)
            if rotation is not None:
                return rotation
        return None

    def _by(self, position: Tensor) -> Rotation | None:
        """Return the rotation by positions, (rows, part / 2)."""
        width = self.angles.shape[-1]
        steps: list[float] = []
        starts: list[float] = []
        for angles, at in zip(self.angles.reshape(-1, width).mT, position.mT, strict=True):
            positions, inverse = cast(tuple[Tensor, Tensor], at.unique(return_inverse=True))
            table = torch.zeros(len(positions), dtype=angles.dtype)
            table[inverse] = angles
            gap = _wrapped(table[inverse] - angles)
            if not _close(gap, torch.zeros_like(gap), 1e-6, size=1.0):
                return None
            if len(positions) < 2 or int(positions[1] - positions[0]) != 1:
                return None
            step = float(_wrapped(table[1] - table[0]))
            gap = _wrapped(table[0] + step * (positions - positions[0]) - table)
            if not _close(gap, torch.zeros_like(gap), 1e-5, size=1.0):
                return None
            steps.append(step)
            starts.append(float(table[0]) / step - float(positions[0]) if step else 0.0)
        if not any(abs(step) > 1e-9 for step in steps):
            return None
        start = starts[max(range(width), key=lambda column: abs(steps[column]))]
        part, pairs = self.part, [(i, i + width) for i in range(width)]
        if self.pairing == "neighbours":  # pairs that are not turned are no part of it
            pairs = [(2 * i, 2 * i + 1) for i in range(width) if abs(steps[i]) > 1e-9]
            steps = [step for step in steps if abs(step) > 1e-9]
            part = 2 * len(steps)
        return Rotation(self.pairing, part, tuple(steps), round(start, 4) + 0.0, tuple(pairs))


@dataclass(frozen=True)
class _Cast:
    """The same numbers with fewer bits."""


def _wrapped(angle: Tensor) -> Tensor:
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _times(before: Tensor, after: Tensor) -> Factor | _Cast | None:
    """Return the factor between two tensors of one shape."""
    if not _has_numbers(before, after):
        return None
    return _Cast() if _close(before, after, 1e-6) else _factor(before, after)


def _norm_or_turn(before: Tensor, after: Tensor) -> Norm | _Turned | None:
    """Return the norm or the rotation between two tensors of one shape."""
    if not _has_numbers(before, after):
        return None
    return _norm(before, after) or _turn(before, after)


def _has_numbers(before: Tensor, after: Tensor) -> bool:
    return bool(before.any()) and bool((before.isfinite() & after.isfinite()).all())


def _factor(before: Tensor, after: Tensor) -> Factor | None:
    largest = before.abs().argmax()
    factor = float(after.flatten()[largest] / before.flatten()[largest])
    return Factor(factor) if _close(before * factor, after) and factor != 1.0 else None


def _norm(before: Tensor, after: Tensor) -> Norm | None:
    width = before.shape[-1]
    if before.ndim < 2 or width < 2:
        return None
    x, y = (t.reshape(-1, width) for t in (before, after))
    if len(x) < 4:
        return None
    return _without_mean(x, y) or _with_mean(x, y)


def _without_mean(x: Tensor, y: Tensor) -> Norm | None:
    """Return the norm if y = weight · x / sqrt(mean(x²) + eps), (rows, width)."""
    width = x.shape[-1]
    square = x.square().mean(-1)
    if not bool((square > 0).all()):
        return None
    unit = x / square.sqrt()[:, None]
    weight = (unit * y).sum(0) / unit.square().sum(0)
    if not _close(unit * weight, y, 1e-2):
        return None
    # The weight is not exact yet, as eps is a part of it; each row has one factor.
    factor = torch.ones(len(x), dtype=torch.float64)
    for _ in range(30):
        factor = (y * x * weight).sum(-1) / (x * weight).square().sum(-1)
        weight = (y * x * factor[:, None]).sum(0) / (x * factor[:, None]).square().sum(0)
    if not _close(x * weight * factor[:, None], y):
        return None
    inverse = factor.pow(-2)
    centred = square - square.mean()
    slope = (centred * (inverse - inverse.mean())).sum() / centred.square().sum()
    eps = inverse.mean() - slope * square.mean()
    if slope <= 0 or not _close(slope * square + eps, inverse, 1e-6):
        return None
    size = weight / slope.sqrt()
    is_even = bool(torch.allclose(size, size.mean().expand_as(size), rtol=1e-6))
    is_l2 = is_even and math.isclose(float(size.mean()), width**-0.5, rel_tol=1e-6)
    return Norm("l2" if is_l2 and eps.abs() < 1e-9 else "rms", width)


def _with_mean(x: Tensor, y: Tensor) -> Norm | None:
    """Return the norm if y = weight · (x - mean) / sqrt(variance + eps) + bias, (rows, width)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    for eps in _EPS:
        unit = centred / (variance + eps).sqrt()
        unit_rest, rest = unit - unit.mean(0), y - y.mean(0)
        weight = (unit_rest * rest).sum(0) / unit_rest.square().sum(0)
        if _close(unit_rest * weight, rest):
            return Norm("layer", x.shape[-1])
    return None


_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0)


def _turn(before: Tensor, after: Tensor) -> _Turned | None:
    width = before.shape[-1]
    if width % 2 or width < 2 or before.ndim < 2:
        return None
    for pairing in ("halves", "neighbours"):
        a, b = (_pairs(t, pairing) for t in (before, after))
        if _close(a.abs(), b.abs(), 1e-6):
            angles = (b * a.conj() / a.abs().square()).angle()
            return _Turned(pairing, width, angles)
    return None


def _pairs(tensor: Tensor, pairing: str) -> Tensor:
    """Return pairs of numbers as complex numbers, (..., width / 2)."""
    if pairing == "halves":
        first, second = tensor.double().chunk(2, -1)
    else:
        first, second = tensor[..., ::2].double(), tensor[..., 1::2].double()
    return torch.complex(first.contiguous(), second.contiguous())


def _close(
    first: Tensor, second: Tensor, tolerance: float = _CLOSE, size: float | None = None
) -> bool:
    size = float(second.abs().max()) if size is None else size
    return bool(((first - second).abs() <= tolerance * max(size, 1e-300)).all())
