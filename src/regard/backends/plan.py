"""What an answer would cost, counted over the boxes that it computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from regard.reductions.reduction import Reduction
from regard.scores.box import Box
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

__all__ = ["Plan", "counted"]


@dataclass(frozen=True)
class Plan:
    """How a backend would answer, and what that costs.

    Attributes:
        how: in words.
        flops: of the matrix products; what is done to single scores comes on top.
        read: bytes of the inputs that are read, again for every block of rows.
        held: bytes that are held at once beside the inputs, the answers included.
    """

    how: str
    flops: int
    read: int
    held: int


def counted(
    boxes: Iterable[Box], source: Scores, reductions: Iterable[Reduction]
) -> tuple[int, int]:
    """The FLOPs of some boxes of the matrix, and the bytes of the inputs that they read."""
    # The value of a product, the query of a second matrix: what the columns are multiplied with.
    operands = [reduction.tensors[0] for reduction in reductions if reduction.tensors]
    width = sum(1 if tensor.ndim == 1 else tensor.shape[-1] for tensor in operands)
    of_query = isinstance(source, QueryKeyScores)
    width += source.query.shape[-1] if of_query else 0
    flops = numbers = 0
    for box in boxes:
        matrices, rows, columns = _lengths(box)
        flops += 2 * matrices * rows * columns * width
        numbers += matrices * (rows + columns / source.group) * width
        numbers += 0 if of_query else matrices * rows * columns
    return flops, int(numbers * source.dtype.itemsize)


def _lengths(box: Box) -> tuple[int, int, int]:
    *leading, rows, columns = (part.stop - part.start for part in box.at_both)
    return prod(leading), rows, columns
