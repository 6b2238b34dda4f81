"""Shares of the parts of a text in the terminal: a row for each query part."""

from collections.abc import Iterator, Sequence
from typing import cast

from rich.cells import cell_len

from regard.analysis.span_shares import Shares
from regard.errors import count_text
from regard.text.escaping import visible
from regard.view.terminal.terminal_lines import fitted

__all__ = ["share_lines"]

_NUMBER = len("0.0000")
_GAP = 2
# Longer names than this stand at the rows alone, or under the table, and their numbers above it.
_LONGEST_ABOVE = 12
_LONGEST_BESIDE = 40
_TOP = 5  # parts that are named of those that do not fit
_LEAST = 22  # cells of a named part and its share


def share_lines(shares: Shares, width: int = 80) -> Iterator[str]:
    r"""Yield the mean over all layers and heads as a table, or as the strongest parts.

    Args:
        shares: of a recording.
        width: of a line.

    Example:
        >>> import torch, regard
        >>> from regard.view.terminal.share_grid import share_lines
        >>> A = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> parts = {"A long sentence.": (0, 1), "Another one.": (1, 2)}
        >>> drawn = regard.segment_shares(regard.Recording({"layer": A}), parts)
        >>> print(*share_lines(drawn), sep="\n")
        What each part draws from each   mean of 1 head in 1 layer
        <BLANKLINE>
                                 1       2
        1 A long sentence.  0.5000  0.5000
        2 Another one.      0.5000  0.5000
    """
    queries, keys = ([visible(name) for name in names] for names in (shares.queries, shares.keys))
    numbered = [f"{number} {name}" for number, name in enumerate(keys, start=1)]
    above = keys
    if max(map(cell_len, keys)) > _LONGEST_ABOVE:
        above = [str(number) for number in range(1, len(keys) + 1)]
        queries = numbered if shares.queries == shares.keys else queries
    beside = min(max(map(cell_len, queries)), _LONGEST_BESIDE, max(10, width // 3))
    column = _GAP + max(_NUMBER + (shares.over is not None), *map(cell_len, above))
    layers, heads = shares.weights.shape[:2]
    without = f", without {count_text(len(shares.sinks), 'sink')}" if shares.sinks else ""
    of = f"{count_text(heads, 'head')} in {count_text(layers, 'layer')}{without}"
    beyond = "" if shares.over is None else f" more than {visible(shares.over)!r}"
    yield f"What each part draws{beyond} from each   mean of {of}"
    yield ""
    rows = cast(list[list[float]], shares.total().tolist())
    if beside + column * len(keys) > width:
        yield from _strongest(queries, numbered, rows, beside, width)
        return
    yield " " * beside + "".join(_right(name, column) for name in above)
    for name, row in zip(queries, rows, strict=True):
        yield fitted(name, beside) + "".join(f"{share:{column}.4f}" for share in row)
    if above != keys and queries != numbered:
        yield from ("", *(fitted(entry, width).rstrip() for entry in numbered))


def _strongest(
    queries: Sequence[str],
    keys: Sequence[str],
    rows: Sequence[Sequence[float]],
    beside: int,
    width: int,
) -> Iterator[str]:
    """Yield for each query the parts that it draws most from, as many as fit into a line."""
    count = max(1, min(_TOP, len(keys), (width - beside) // _LEAST))
    cells = (width - beside) // count - _GAP
    for name, row in zip(queries, rows, strict=True):
        best = sorted(range(len(row)), key=lambda place: -row[place])[:count]
        parts = (
            " " * _GAP + fitted(keys[at], cells - 8) + f"{100 * row[at]:6.1f} %" for at in best
        )
        yield fitted(name, beside) + "".join(parts)
    yield ""
    yield f"the strongest {count} of {len(keys)} parts; --json gives all"


def _right(name: str, cells: int) -> str:
    return " " * (cells - cell_len(name)) + name
