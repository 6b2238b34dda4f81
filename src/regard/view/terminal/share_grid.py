"""Shares of the parts of a text in the terminal: a row for each query part."""

from collections.abc import Iterator
from typing import cast

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from regard.analysis.span_shares import Shares
from regard.errors import count_text
from regard.text.escaping import visible
from regard.view.terminal.terminal_lines import fitted, table_lines

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
    table = Table.grid(padding=(0, 0, 0, _GAP))
    table.add_column(max_width=beside, no_wrap=True, overflow="ellipsis")
    fits = beside + column * len(keys) <= width
    count = len(keys) if fits else max(1, min(_TOP, (width - beside) // _LEAST))
    for _ in range(count):
        table.add_column(justify="right" if fits else "left", no_wrap=True, overflow="ellipsis")
    if fits:
        table.add_row("", *map(Text, above))
    for name, row in zip(queries, rows, strict=True):
        cells = [f"{share:.4f}" for share in row]
        if not fits:
            best = sorted(range(len(row)), key=lambda place: -row[place])[:count]
            word = (width - beside) // count - _GAP - 8
            cells = [f"{fitted(numbered[at], word)}{100 * row[at]:6.1f} %" for at in best]
        table.add_row(*map(Text, (name, *cells)))
    yield from (line.plain for line in table_lines(table, width))
    if not fits:
        yield from ("", f"the strongest {count} of {len(keys)} parts; --json gives all")
    elif above != keys and queries != numbered:
        yield from ("", *(fitted(entry, width).rstrip() for entry in numbered))
