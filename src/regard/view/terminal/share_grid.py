"""How much each part of a text drew from each other part, in the terminal: a row for each query."""

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


def share_lines(shares: Shares, width: int | None = None) -> Iterator[str]:
    r"""The mean over all layers and heads, queries down, keys across.

    Args:
        shares: of a recording.
        width: of a line; as many keys are shown as fit, at least one. All when left out.

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
    beside = min(max(map(cell_len, queries)), _LONGEST_BESIDE)
    beside = beside if width is None else min(beside, max(10, width // 3))
    column = _GAP + max(_NUMBER, *map(cell_len, above))
    shown = len(keys) if width is None else max(1, (width - beside) // column)
    layers, heads = shares.weights.shape[:2]
    without = f", without {count_text(len(shares.sinks), 'sink')}" if shares.sinks else ""
    of = f"{count_text(heads, 'head')} in {count_text(layers, 'layer')}{without}"
    yield f"What each part draws from each   mean of {of}"
    yield ""
    yield " " * beside + "".join(_right(name, column) for name in above[:shown])
    rows = cast(list[list[float]], shares.total()[:, :shown].tolist())
    for name, row in zip(queries, rows, strict=True):
        yield fitted(name, beside) + "".join(f"{share:{column}.4f}" for share in row)
    yield from _under(numbered[:shown] if above != keys and queries != numbered else [], width)
    if shown < len(keys):
        yield ""
        yield f"and {count_text(len(keys) - shown, 'more part')} to draw from; --json gives all"


def _right(name: str, cells: int) -> str:
    return " " * (cells - cell_len(name)) + name


def _under(legend: Sequence[str], width: int | None) -> Iterator[str]:
    """What the numbers above the table mean, where no row says it."""
    if legend:
        yield ""
    for entry in legend:
        yield entry if width is None else fitted(entry, width).rstrip()
