"""Whether weights meet their value in the order in which their softmax gave them, and all."""

import math

from regard.capture.element_axes import Axes

__all__ = ["is_relaid", "keys_met"]


def is_relaid(seen: Axes, matrix: Axes) -> bool:
    """Whether a view of weights repeats a part of them, or takes heads for another axis.

    Args:
        seen: the axes of the view, in what the softmax gave.
        matrix: the axes of the matrix there.

    Example:
        >>> from regard.capture.element_axes import Axes, contiguous
        >>> matrix = Axes((3, 2, 5, 5), (50, 25, 5, 1), 0, (50, 25, 5, 1))
        >>> first_head = Axes((3, 2, 5, 5), (50, 0, 5, 1), 0, (50, 0, 5, 1))
        >>> heads_for_texts = Axes((3, 2, 5, 5), (25, 75, 5, 1), 0, (25, 75, 5, 1))
        >>> [is_relaid(axes, matrix) for axes in (matrix, first_head, heads_for_texts)]
        [False, True, True]
    """
    if seen.places == matrix.places and seen.sizes == matrix.sizes:
        return False
    sides = [pair for pair in zip(seen.sizes, seen.places, strict=True) if pair[0] > 1]
    known = _sides(matrix)
    moving = [(size, place) for size, place in sides if place]
    if len(moving) < len(sides) and _count(moving) < _count(known):
        return True
    unit = max((size * place for size, place in known[-2:]), default=0)
    leading = [(size, place) for size, place in moving if place >= unit]
    return len(leading) > 1 and any(not _fits(*side, known) for side in leading)


def keys_met(line: Axes, matrix: Axes, normal: int, length: int) -> tuple[int, int]:
    """Which keys a row of weights shows, and which there are: a bit for each.

    Args:
        line: the axis of the row, in what the softmax gave.
        matrix: the axes of the matrix there.
        normal: how far one step along the axis of the softmax goes.
        length: of that axis.

    Example:
        >>> from regard.capture.element_axes import Axes
        >>> matrix = Axes((2, 3), (3, 1), 0, (3, 1))
        >>> shown, there = keys_met(Axes((2,), (1,), 1, (1,), 1), matrix, 1, 3)
        >>> f"{shown:b} of {there:b}"
        '110 of 111'
    """
    first, step = line.start // normal % length, line.places[0] // normal
    shown = sum(1 << first + step * each for each in range(line.sizes[0]))
    return shown, (1 << matrix.sizes[-1]) - 1 << matrix.start // normal % length


def _sides(axes: Axes) -> list[tuple[int, int]]:
    """The axes that have steps, each with its size and place, from the largest step down."""
    pairs = zip(axes.sizes, axes.places, strict=True)
    return sorted((p for p in pairs if p[0] > 1 and p[1]), key=lambda side: -side[1])


def _count(sides: list[tuple[int, int]]) -> int:
    return math.prod(size for size, _ in sides)


def _fits(size: int, place: int, known: list[tuple[int, int]]) -> bool:
    """Whether an axis lies in one of the known ones, or is several of them in one."""
    for i, (sides, step) in enumerate(known):
        if step <= place < sides * step:
            if size * place <= sides * step:
                return True
            return place == step and any(
                size * place == more * further for more, further in known[:i]
            )
    return False
