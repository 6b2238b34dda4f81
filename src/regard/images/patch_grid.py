"""Grids of patches: the tokens that stand for the parts of a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import cast

import torch
from torch import Tensor

from regard.errors import check_count, check_number, check_whole, kind_text

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the original picture."""

_FAR = 2**31
"""Larger positions and pixels are damage."""


@dataclass(frozen=True)
class Grid:
    """A grid of tokens that stand for the parts of a picture. ``regard.grid`` makes one.

    Attributes:
        tokens: the position of the token of each part, row by row.
        rows: the number of rows.
        columns: the number of columns.
        picture: the index of the picture; the frames of a video are pictures.
        box: the part of the picture that the grid covers, in its pixels; None for all of it. It
            lies inside the picture if a processor cropped, and partly outside if it padded.
        entry: the entry of the batch that has the tokens: the tile of a vision encoder, or the
            window of a Swin transformer.
        overlapping: True if the receptive fields of the tokens overlap. Each box is then centred
            in the receptive field of its token, which reaches beyond the box.

    Example:
        >>> import regard
        >>> grid = regard.grid(tokens=range(1, 5), rows=2, columns=2)
        >>> grid.boxes(64, 32)[2]
        tensor([ 0., 16., 32., 32.])
    """

    tokens: Sequence[int]
    rows: int
    columns: int
    picture: int = 0
    box: Box | None = None
    entry: int = 0
    overlapping: bool = False

    def __post_init__(self) -> None:
        """Check all arguments."""
        rows, columns = check_count("rows", self.rows), check_count("columns", self.columns)
        tokens = _checked_tokens(self.tokens)
        if len(tokens) != rows * columns:
            raise ValueError(
                f"tokens has {len(tokens)} positions; a grid of {rows} rows and {columns} columns "
                f"has {rows * columns}.\n    Give one token for each patch, row by row, without "
                "class and register tokens."
            )
        for name in ("picture", "entry"):
            number = check_whole(name, getattr(self, name))
            if not 0 <= number < _FAR:
                raise ValueError(f"{name} is {number}; it must be an index, counted from 0.")
        if not isinstance(self.overlapping, bool):
            raise TypeError(f"overlapping is {kind_text(self.overlapping)}; it must be a bool.")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "box", _checked_box(self.box))

    def boxes(self, width: int, height: int) -> Tensor:
        """Return the box of each token in a picture of this size, (tokens, 4): x0, y0, x1, y1."""
        x0, y0, x1, y1 = self.box or (0, 0, width, height)
        x = x0 + (x1 - x0) * torch.arange(self.columns + 1, device="cpu").double() / self.columns
        y = y0 + (y1 - y0) * torch.arange(self.rows + 1, device="cpu").double() / self.rows
        x, y = x.float(), y.float()
        sides = x[:-1], y[:-1, None], x[1:], y[1:, None]
        wide = [side.expand(self.rows, self.columns) for side in sides]
        return torch.stack(wide, -1).flatten(0, 1)  # (tokens, 4)


def grid(
    tokens: Iterable[int],
    rows: int,
    columns: int,
    *,
    picture: int = 0,
    box: Sequence[float] | None = None,
    entry: int = 0,
) -> Grid:
    """Return a grid of tokens that stand for the parts of a picture.

    Args:
        tokens: the positions of the tokens, row by row, without class and register tokens.
        rows: the number of rows.
        columns: the number of columns.
        picture: the index of the picture.
        box: the part of the picture that the grid covers, x0, y0, x1, y1 in its pixels. The default
            is the whole picture.
        entry: the entry of the batch that has the tokens.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the number of tokens is not rows x columns, a token occurs twice, or the box is
            empty.

    Example:
        >>> import regard
        >>> regard.grid(tokens=range(1, 197), rows=14, columns=14).boxes(224, 224)[0]
        tensor([ 0.,  0., 16., 16.])
    """
    is_checked = isinstance(tokens, Sequence) or not isinstance(cast(object, tokens), Iterable)
    positions = cast("Sequence[int]", tokens if is_checked else tuple(tokens))
    return Grid(positions, rows, columns, picture, None if box is None else _box(box), entry)


def _box(box: Sequence[float]) -> Box:
    """Return a box as a tuple; ``Grid`` checks it."""
    return cast(Box, tuple(box))


def _checked_tokens(tokens: object) -> Sequence[int]:
    """Return positions as a range, if they are one, or a tuple."""
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise TypeError(
            f"tokens is {kind_text(tokens)}; it must be positions of tokens.\n"
            "    Pass for example tokens=range(1, 197)."
        )
    given = cast(Sequence[object], tokens)
    positions = tuple(check_whole("a position in tokens", each) for each in given)
    wrong = [each for each in positions if not 0 <= each < _FAR]
    if wrong:
        raise ValueError(f"tokens has the position {wrong[0]}; positions are counted from 0.")
    if len(set(positions)) < len(positions):
        raise ValueError("tokens has a position twice; each token stands for one part.")
    if positions and all(after == before + 1 for before, after in pairwise(positions)):
        return range(positions[0], positions[-1] + 1)
    return positions


def _checked_box(box: object) -> Box | None:
    if box is None:
        return None
    remedy = "Pass x0, y0, x1, y1 in pixels of the picture."
    sides = cast(Sequence[float], box)
    if not isinstance(box, Sequence) or len(sides) != 4:
        raise TypeError(f"box is {kind_text(sides)}; it must be four numbers.\n    {remedy}")
    x0, y0, x1, y1 = (check_number("a side of box", each, remedy) for each in sides)
    if not all(map(isfinite, (x0, y0, x1, y1))) or not (x0 < x1 and y0 < y1):
        raise ValueError(f"box is {tuple(sides)}; it must have x0 < x1 and y0 < y1.\n    {remedy}")
    return x0, y0, x1, y1
