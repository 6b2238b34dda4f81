"""Lines of a terminal: words in grey that wrap under where they began, and what fits."""

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

QUIET = "bright_black"
WIDEST = 120


def fitted(text: str, cells: int) -> str:
    """Exactly so many cells, also with wide characters; what is cut ends with an ellipsis.

    Example:
        >>> from regard.view.terminal.terminal_lines import fitted
        >>> fitted("dessert", 5), fitted("eat", 5)
        ('dess…', 'eat  ')
    """
    if cell_len(text) <= cells:
        return set_cell_size(text, cells)
    return set_cell_size(text, cells - 1) + "…"


def table_lines(table: Table, width: int) -> list[Text]:
    """Return the lines of a table without blanks at their ends."""
    console = Console(width=width, emoji=False)
    lines = [
        Text.assemble(*((part.text, part.style or "") for part in line))
        for line in console.render_lines(table, pad=False)
    ]
    for line in lines:
        line.rstrip()
    return lines


def hanging(start: Text, words: str, width: int) -> list[Text]:
    """Wrap grey words after a start, and indent further lines to the first word.

    Args:
        start: what stands before them; changed in place.
        words: with single blanks between; a no-break space holds two together.
        width: of a line.

    Example:
        >>> from rich.text import Text
        >>> from regard.view.terminal.terminal_lines import hanging
        >>> [line.plain for line in hanging(Text("L0H2  "), "looks at the token before", 18)]
        ['L0H2  looks at the', '      token before']
    """
    margin = cell_len(start.plain)
    lines, line, used = [], start, margin
    for number, word in enumerate(words.split(" ")):
        if number and used + 1 + cell_len(word) > width:
            lines.append(line)
            line, used = Text(" " * margin), margin
        elif number:
            line.append(" ")
            used += 1
        line.append(word.replace("\xa0", " "), QUIET)
        used += cell_len(word)
    return [*lines, line]
