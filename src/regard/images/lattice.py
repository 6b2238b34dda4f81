"""Grids from the measured place of each token."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from regard.images.patch_grid import Box, Grid

_NEAR = 0.3  # of a patch: a token that is farther from its place in a lattice is in none
_SIZES = 1.08  # patches whose sizes differ by less are patches of one grid
_NOISE = 1 / 500  # of a picture: centres that are nearer to each other are equal
_SNAP = 0.05  # of a patch: a grid that ends so near to an edge of the picture ends there


class Spot(NamedTuple):
    """The measured place of a token in a picture, in pixels.

    Attributes:
        token: the position of the token.
        entry: the entry of the batch.
        picture: the index of the picture.
        x: the centre of its pixels.
        y: the centre of its pixels.
        width: the width of its pixels.
        height: the height of its pixels.
        full_x: False if its field is cut by padding or an edge, so that x is moved.
        full_y: False if its field is cut above or below.
    """

    token: int
    entry: int
    picture: int
    x: float
    y: float
    width: float
    height: float
    full_x: bool
    full_y: bool


def lattices(
    spots: Sequence[Spot], sizes: Sequence[tuple[int, int]], *, overlapping: bool = False
) -> tuple[Grid, ...]:
    """Return the grids that tokens form; tokens in no complete grid have one of a single patch.

    Args:
        spots: the places of the tokens.
        sizes: the width and the height of each picture.
        overlapping: True if the fields of the tokens overlap.
    """
    grids: list[Grid] = []
    for picture, size in enumerate(sizes):
        members = [spot for spot in spots if spot.picture == picture]
        for of_size in [members] if overlapping and members else _of_one_size(members):
            common = _Lattice.of(of_size, size, overlapping=overlapping)
            for entry in sorted({spot.entry for spot in of_size}):
                part = [spot for spot in of_size if spot.entry == entry]
                # All entries lie on one lattice, such as windows, or each on its own.
                lattice = common or _Lattice.of(part, size, overlapping=overlapping)
                if lattice is not None:
                    grids += _grids_of(part, lattice, size, overlapping=overlapping)
                elif not overlapping:  # such fields say nothing of the distance of their tokens
                    grids += [_single(spot, size) for spot in part]
    return tuple(sorted(grids, key=lambda grid: (grid.entry, grid.picture, min(grid.tokens))))


def _of_one_size(spots: Sequence[Spot]) -> list[list[Spot]]:
    """Split spots by the size of their patches; a spot at padding joins the nearest size."""
    full = sorted(
        (spot for spot in spots if spot.full_x), key=lambda spot: spot.width * spot.height
    )
    classes: list[list[Spot]] = []
    for spot in full:
        if not classes or _area(spot) > _SIZES**2 * _area(classes[-1][-1]):
            classes.append([])
        classes[-1].append(spot)
    if not classes:
        return [list(spots)] if spots else []
    for spot in spots:
        if not spot.full_x:
            larger = [each for each in classes if _area(each[-1]) * _SIZES**2 >= _area(spot)]
            (larger or classes)[0].append(spot)
    return classes


def _area(spot: Spot) -> float:
    return spot.width * spot.height


class _Axis(NamedTuple):
    """The line on which the centres of rows or columns lie.

    Attributes:
        start: the centre of row or column 0.
        step: the distance of neighbours.
        indices: the row or column of each spot.
    """

    start: float
    step: float
    indices: dict[Spot, int]

    @staticmethod
    def of(
        spots: Sequence[Spot],
        centres: Sequence[float],
        widths: Sequence[float],
        full: Sequence[bool],
        *,
        length: int,
        overlapping: bool,
    ) -> "_Axis | None":
        """Fit a line to the centres along one axis; None if they lie on none."""
        at, use = torch.tensor(centres, device="cpu").double(), torch.tensor(full, device="cpu")
        if not bool(use.any()):
            return None
        step = float(torch.tensor(widths, device="cpu").double()[use].median())
        order = at.argsort()
        gaps = at[order].diff()
        if overlapping:
            between = at[use].sort().values.diff()
            between = between[between > _NOISE * length]
            step = float(between.median()) if len(between) else step
        # Centres that are less than a quarter of a patch apart are one row or column. Those of
        # fields that an edge cuts are half as far apart as others.
        steps = torch.where(gaps > step / 4, (gaps / step).round().clamp(min=1), 0.0)
        indices = torch.zeros_like(at)
        indices[order[1:]] = steps.cumsum(0)
        # Interpolation moves the first and the last centre a little.
        numbers = cast("list[float]", indices.tolist())
        used = {number for number, is_full in zip(numbers, full, strict=True) if is_full}
        inner = use & (indices > min(used)) & (indices < max(used))
        use = inner if len(used) > 3 else use
        spread = indices[use] - indices[use].mean()
        if bool((spread != 0).any()):
            step = float((spread * at[use]).sum() / spread.square().sum())
        start = float(at[use].mean() - step * indices[use].mean())
        if bool(((at - start - step * indices).abs()[use] > _NEAR * step).any()):
            return None
        return _Axis(
            start,
            step,
            dict(zip(spots, map(int, cast("list[float]", indices.tolist())), strict=True)),
        )


class _Lattice(NamedTuple):
    """The columns and rows on which tokens lie."""

    across: _Axis
    down: _Axis

    @staticmethod
    def of(spots: Sequence[Spot], size: tuple[int, int], *, overlapping: bool) -> "_Lattice | None":
        """Fit a lattice to tokens of one size; None if they lie on none."""
        sides = (
            [(spot.x, spot.width, spot.full_x) for spot in spots],
            [(spot.y, spot.height, spot.full_y) for spot in spots],
        )
        across, down = (
            _Axis.of(spots, *zip(*side, strict=True), length=length, overlapping=overlapping)
            for side, length in zip(sides, size, strict=True)
        )
        return None if across is None or down is None else _Lattice(across, down)


def _grids_of(
    spots: Sequence[Spot], lattice: _Lattice, size: tuple[int, int], *, overlapping: bool
) -> list[Grid]:
    """Return the grids of tokens of one entry on a lattice."""
    # Tokens at one place, such as those of two copies of a picture, lie in different grids.
    layers: list[dict[tuple[int, int], Spot]] = []
    for spot in sorted(spots):
        row, column = lattice.down.indices[spot], lattice.across.indices[spot]
        free = next((each for each in layers if (row, column) not in each), None)
        if free is None:
            layers.append(free := {})
        free[row, column] = spot
    return [
        grid
        for layer in layers
        for grid in _of_cells(layer, lattice, size, overlapping=overlapping)
    ]


def _of_cells(
    cells: dict[tuple[int, int], Spot],
    lattice: _Lattice,
    size: tuple[int, int],
    *,
    overlapping: bool,
) -> list[Grid]:
    """Return one grid of complete rows and columns, or one for each token."""
    across, down = lattice
    rows, columns = ([cell[axis] for cell in cells] for axis in (0, 1))
    top, left = min(rows), min(columns)
    num_rows, num_columns = max(rows) - top + 1, max(columns) - left + 1

    def box(row: int, column: int, num_rows: int, num_columns: int) -> Box | None:
        x0, x1 = (across.start + across.step * (at - 0.5) for at in (column, column + num_columns))
        y0, y1 = (down.start + down.step * (at - 0.5) for at in (row, row + num_rows))
        return _snapped((x0, y0, x1, y1), (across.step, down.step), size)

    def grid(spots: Sequence[Spot], rows: int, columns: int, box: Box | None) -> Grid:
        tokens = [spot.token for spot in spots]
        return Grid(tokens, rows, columns, spots[0].picture, box, spots[0].entry, overlapping)

    if len(cells) == num_rows * num_columns:
        spots = [cells[cell] for cell in sorted(cells)]
        return [grid(spots, num_rows, num_columns, box(top, left, num_rows, num_columns))]
    return [grid([spot], 1, 1, box(*cell, 1, 1)) for cell, spot in cells.items()]


def _single(spot: Spot, size: tuple[int, int]) -> Grid:
    half = spot.width / 2, spot.height / 2
    box = (spot.x - half[0], spot.y - half[1], spot.x + half[0], spot.y + half[1])
    snapped = _snapped(box, (spot.width, spot.height), size)
    return Grid([spot.token], 1, 1, spot.picture, snapped, spot.entry)


def _snapped(box: Box, steps: tuple[float, float], size: tuple[int, int]) -> Box | None:
    """Round a box to a hundredth of a pixel, and let sides near the picture's edges lie on them."""
    sides: list[float] = []
    for at, side in enumerate(box):
        length, step = size[at % 2], steps[at % 2]
        edge = 0 if abs(side) < abs(side - length) else length
        sides.append(float(edge) if abs(side - edge) < _SNAP * step else round(side, 2))
    x0, y0, x1, y1 = sides
    return None if sides == [0, 0, *size] else (x0, y0, x1, y1)
