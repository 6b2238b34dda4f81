"""The way from a projection, or an input, to the query, the key or the value of an attention.

A way is a row of operations on each token alone: a factor, a norm, a rotation by position. Each of
them is found by a relation between the numbers of two tensors, whatever operations the code used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.origins import Coordinates, Numbers, Sizes, located

__all__ = ["Factor", "Norm", "Part", "Path", "Rotation", "path_to"]

_CLOSE = 1e-9
_MOST = 8  # operations on a way


@dataclass(frozen=True)
class Factor:
    """All numbers times one number."""

    factor: float


@dataclass(frozen=True)
class Norm:
    """Numbers divided by their root mean square (rms), length (l2) or standard deviation (layer).

    Attributes:
        kind: "rms", "l2" or "layer".
        width: over how many numbers.
    """

    kind: str
    width: int


@dataclass(frozen=True)
class Rotation:
    """Pairs of numbers turned by an angle that grows with the position.

    Attributes:
        pairing: "halves": i with i + part / 2; "neighbours": 2i with 2i + 1.
        part: how many columns of a head are turned.
        angles: of a step of one token, in radians, (part / 2).
        start: the position of the first token.
    """

    pairing: str
    part: int
    angles: tuple[float, ...]
    start: float

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
    """One of several parts of the columns, each with a way of its own."""

    paths: tuple["Path", ...]


Operation = Factor | Norm | Rotation | Part


@dataclass(frozen=True, eq=False)
class Path:
    """The way to a tensor.

    Attributes:
        source: the number of the step of the projection, or the name of the input.
        operations: from the source on; None if the way could not be read.
        line: of the step that could not be read.
        coordinates: of each element of the tensor in the source; None if they are unknown.
    """

    source: int | str
    operations: tuple[Operation, ...] | None
    line: str
    coordinates: Coordinates | None = field(repr=False)


def path_to(tensor: Tensor, numbers: Numbers, sizes: Sizes, *, before: int) -> Path:
    """Return the way to a tensor that a run held before a step."""
    return _path(tensor, numbers, sizes, before, _MOST)


def _path(tensor: Tensor, numbers: Numbers, sizes: Sizes, before: int, most: int) -> Path:
    origin = numbers.origin(tensor, before=before)
    if origin is None:
        return Path(-1, None, "", None)
    if origin.at < 0:
        place = located(origin.tensor.shape, sizes)
        return Path(origin.name, (), "", None if place is None else _of(place, origin.index))
    step = numbers.steps[origin.at]
    if step.projects and not _is_norm(step.name):
        place = numbers.located(origin, sizes)
        return Path(origin.at, (), "", None if place is None else _of(place, origin.index))
    if not most:
        return Path(origin.at, None, step.line, None)
    held = origin.tensor
    candidates = [
        (at, earlier, shape)
        for at, _, earlier in numbers.like(held, before=origin.at)
        if (shape := _common_shape(earlier.shape, held.shape)) is not None
        and _may_precede(earlier, held)
    ]
    # A factor first: with it, a norm of what is before it would look like one of other weights.
    for relation in (_times, _norm_or_turn):
        for at, earlier, shape in candidates:
            change = relation(earlier.reshape(shape), held.reshape(shape))
            if change is None:
                continue
            before_it = _path(earlier, numbers, sizes, at + 1, most - 1)
            if before_it.operations is None or before_it.coordinates is None:
                continue
            place = before_it.coordinates.reshape(*shape)
            if isinstance(change, _Turned):
                turned = change.rotation(place, sizes.positions)
                if turned is None:
                    continue
                change = turned
            made = () if isinstance(change, _Cast) else (change,)
            operations = (*before_it.operations, *made)
            return Path(before_it.source, operations, "", _of(place, origin.index))
    if step.name == "cat":
        return _of_parts(held, numbers, sizes, origin.at, origin.index, most)
    return Path(origin.at, None, step.line, None)


def _common_shape(one: torch.Size, other: torch.Size) -> torch.Size | None:
    """Return the shape of two tensors, one of which may have pairs as an axis of their own."""
    for wide, split in ((one, other), (other, one)):
        if len(split) == len(wide) + 1 and split[-1] == 2 and split[:-2] == wide[:-1]:
            return wide
    return one if one == other else None


def _of(place: Coordinates, index: Tensor) -> Coordinates:
    return place.at(index.flatten()).reshape(*index.shape)


def _of_parts(
    held: Tensor, numbers: Numbers, sizes: Sizes, at: int, index: Tensor, most: int
) -> Path:
    """Return the way to a tensor that was put together of parts along its last axis."""
    step = numbers.steps[at]
    pieces = [t for t in step.inputs if t.is_floating_point() and t.numel()]
    lead = held.shape[:-1]
    if any(t.shape[:-1] != lead for t in pieces):
        return Path(at, None, step.line, None)
    ways: list[Path] = []
    start = 0
    for piece in pieces:
        own = held[..., start : start + piece.shape[-1]]
        start += piece.shape[-1]
        way = _path(own, numbers, sizes, at, most - 1)
        if way.operations is None or way.coordinates is None:
            return Path(at, None, way.line or step.line, None)
        ways.append(way)
    if start != held.shape[-1]:
        return Path(at, None, step.line, None)
    places = [way.coordinates for way in ways if way.coordinates is not None]
    names = ("sample", "token", "column")
    joined = Coordinates(*(torch.cat([getattr(p, n) for p in places], -1) for n in names))
    # Columns of several projections are told apart by the projection.
    operations = (Part(tuple(ways)),)
    return Path(ways[0].source, operations, "", _of(joined, index))


def _is_norm(name: str) -> bool:
    return "norm" in name


def _may_precede(earlier: Tensor, held: Tensor) -> bool:
    return not (earlier.numel() == held.numel() and torch.equal(earlier.reshape(held.shape), held))


@dataclass(frozen=True, eq=False)
class _Turned:
    """Pairs of numbers that kept their length: a rotation, if the angles follow the positions."""

    pairing: str
    part: int
    angles: Tensor  # (..., part / 2)

    def rotation(self, place: Coordinates, given: Sequence[Tensor]) -> Rotation | None:
        """Return the rotation if each angle is one step's angle times the position.

        The position is the number of the token, or what one of the given tables says of it.
        """
        half = self.part // 2
        first = slice(0, half) if self.pairing == "halves" else slice(0, self.part, 2)
        width = self.angles.shape[-1]
        sample, token = (t[..., first].reshape(-1, width) for t in (place.sample, place.token))
        for table in (None, *given):
            position = token
            if table is not None:
                rows = table.reshape(-1, table.shape[-1])
                position = rows[sample if len(rows) > 1 else torch.zeros_like(sample), token]
            found = self._by(position)
            if found is not None:
                return found
        return None

    def _by(self, position: Tensor) -> Rotation | None:
        """Return the rotation by positions, (rows, part / 2)."""
        width = self.angles.shape[-1]
        angles = self.angles.reshape(-1, width)
        steps: list[float] = []
        starts: list[float] = []
        for column in range(width):
            own, at = angles[:, column], position[:, column]
            known, place = cast(tuple[Tensor, Tensor], at.unique(return_inverse=True))
            table = torch.zeros(len(known), dtype=own.dtype)
            table[place] = own
            if not _close(_wrapped(table[place] - own), torch.zeros_like(own), 1e-6, size=1.0):
                return None
            if len(known) < 2 or int(known[1] - known[0]) != 1:
                return None
            step = float(_wrapped(table[1] - table[0]))
            grown = table[0] + step * (known - known[0])
            if not _close(_wrapped(grown - table), torch.zeros_like(table), 1e-5, size=1.0):
                return None
            steps.append(step)
            starts.append(float(table[0]) / step - float(known[0]) if step else 0.0)
        if not any(abs(step) > 1e-9 for step in steps):
            return None
        start = starts[max(range(width), key=lambda own: abs(steps[own]))]
        part = self.part
        if self.pairing == "neighbours":  # pairs that are not turned are no part of it
            steps = [step for step in steps if abs(step) > 1e-9]
            part = 2 * len(steps)
        return Rotation(self.pairing, part, tuple(steps), round(start, 4) + 0.0)


@dataclass(frozen=True)
class _Cast:
    """The same numbers with fewer bits."""


def _wrapped(angle: Tensor) -> Tensor:
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _times(one: Tensor, other: Tensor) -> Factor | _Cast | None:
    """Return the factor that makes one tensor of another one of its shape."""
    if not _has_numbers(one, other):
        return None
    return _Cast() if _close(one, other, 1e-6) else _factor(one, other)


def _norm_or_turn(one: Tensor, other: Tensor) -> Norm | _Turned | None:
    """Return what else makes one tensor of another one of its shape, each token alone."""
    return (_norm(one, other) or _turn(one, other)) if _has_numbers(one, other) else None


def _has_numbers(one: Tensor, other: Tensor) -> bool:
    return bool(one.any()) and bool((one.isfinite() & other.isfinite()).all())


def _factor(one: Tensor, other: Tensor) -> Factor | None:
    top = one.abs().argmax()
    factor = float(other.flatten()[top] / one.flatten()[top])
    return Factor(factor) if _close(one * factor, other) and factor != 1.0 else None


def _norm(one: Tensor, other: Tensor) -> Norm | None:
    width = one.shape[-1]
    if one.ndim < 2 or width < 2:
        return None
    x = one.reshape(-1, width)
    y = other.reshape(-1, width)
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
    own, other = square - square.mean(), inverse - inverse.mean()
    slope = (own * other).sum() / own.square().sum()
    added = inverse.mean() - slope * square.mean()
    if slope <= 0 or not _close(slope * square + added, inverse, 1e-6):
        return None
    size = weight / slope.sqrt()
    is_even = bool(torch.allclose(size, size.mean().expand_as(size), rtol=1e-6))
    is_l2 = is_even and math.isclose(float(size.mean()), width**-0.5, rel_tol=1e-6)
    return Norm("l2" if is_l2 and added.abs() < 1e-9 else "rms", width)


def _with_mean(x: Tensor, y: Tensor) -> Norm | None:
    """Return the norm if y = weight · (x - mean) / sqrt(variance + eps) + bias, (rows, width)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    for eps in _EPS:
        unit = centred / (variance + eps).sqrt()
        own, other = unit - unit.mean(0), y - y.mean(0)
        weight = (own * other).sum(0) / own.square().sum(0)
        if _close(own * weight, other):
            return Norm("layer", x.shape[-1])
    return None


_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0)


def _turn(one: Tensor, other: Tensor) -> _Turned | None:
    width = one.shape[-1]
    if width % 2 or width < 2 or one.ndim < 2:
        return None
    for pairing in ("halves", "neighbours"):
        parts = [width]
        if pairing == "neighbours" or width % 4 == 0:
            parts += []
        for part in parts:
            a, b = (_pairs(t, pairing, part) for t in (one, other))
            if not _close(a.abs(), b.abs(), 1e-6):
                continue
            angles = (b * a.conj() / a.abs().square()).angle()
            return _Turned(pairing, part, angles)
    return None


def _pairs(tensor: Tensor, pairing: str, part: int) -> Tensor:
    own = tensor[..., :part].double()
    if pairing == "halves":
        first, second = own.chunk(2, -1)
    else:
        first, second = own[..., ::2], own[..., 1::2]
    return torch.complex(first.contiguous(), second.contiguous())


def _close(
    one: Tensor, other: Tensor, tolerance: float = _CLOSE, size: float | None = None
) -> bool:
    size = float(other.abs().max()) if size is None else size
    return bool(((one - other).abs() <= tolerance * max(size, 1e-300)).all())
