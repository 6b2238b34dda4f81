"""A table of plain values, with conversion to pandas and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any

from regard.errors import optional_module
from regard.text.escaping import visible

Cell = str | float | int | bool | None
"""The content of one cell of a table; None is an empty cell."""

# A table with more rows shows only its first and last rows.
_MOST_ROWS = 20
_AT_AN_END = 8
_WIDEST = 40


class Table:
    """An immutable table of named columns of plain values, all with the same length.

    Args:
        columns: a sequence of values for each name. A column contains str, int, float or bool, and
            None for missing values. A column of int and float becomes float.

    Raises:
        TypeError: a column has another type or mixed types.
        ValueError: the columns have different lengths, or there are no columns.

    Example:
        >>> import regard
        >>> table = regard.Table({"head": ["L0H1", "L5H3"], "score": [0.25, 0.96875]})
        >>> table
        head   score
        L0H1  0.2500
        L5H3  0.9688
        >>> table["score"], len(table), table.records()[0]
        ((0.25, 0.96875), 2, {'head': 'L0H1', 'score': 0.25})
    """

    def __init__(self, columns: Mapping[str, Sequence[Cell]]) -> None:
        self._columns = {name: _checked(name, columns[name]) for name in columns}
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) != 1:
            came = ", ".join(f"{name!r}: {n}" for name, n in lengths.items()) or "no columns"
            raise ValueError(
                f"columns has {came}; all columns must have one length, and there must be one.\n"
                "    Put None where a value is missing."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> tuple[Cell, ...]:
        """Return the values of a column.

        Raises:
            KeyError: there is no column of that name.
        """
        if name not in self._columns:
            raise KeyError(f"name is {name!r}; this table has {', '.join(self.names)}")
        return self._columns[name]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self._columns.values())))

    def __iter__(self) -> Iterator[dict[str, Cell]]:
        """Yield each row as a dict."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def __eq__(self, other: object) -> bool:
        """Return True if the other is a table of the same columns in the same order."""
        if not isinstance(other, Table):
            return NotImplemented
        return list(self._columns.items()) == list(other._columns.items())

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def records(self) -> list[dict[str, Cell]]:
        """Return the rows as plain dicts."""
        return list(self)

    def to_json(self) -> str:
        """Return the rows as a JSON list of objects; NaN and inf become null."""
        return json.dumps([{name: _jsonable(row[name]) for name in row} for row in self])

    def to_pandas(self) -> Any:
        """Return the table as a ``pandas.DataFrame``.

        Raises:
            RegardError: pandas is not installed.
        """
        pandas = optional_module("pandas", "to_pandas() needs pandas", "pandas")
        return pandas.DataFrame(dict(self._columns))

    def text(self) -> str:
        """Return all rows as text with aligned columns, in the format of ``repr``."""
        return "\n".join(self._lines(range(len(self))))

    def __repr__(self) -> str:
        """Return the rows as text with aligned columns; a long table omits rows in the middle."""
        rows, omitted = self._ends()
        lines = self._lines(rows)
        if omitted:
            lines.insert(1 + _AT_AN_END, f"... {omitted} more rows ...")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the rows as HTML for a notebook; a long table omits rows in the middle."""
        rows, omitted = self._ends()
        head, *body = self._cells(rows)
        lines = [_html_row("th", head), *(_html_row("td", cells) for cells in body)]
        if omitted:
            more = f'<tr><td colspan="{len(head)}">... {omitted} more rows ...</td></tr>'
            lines.insert(1 + _AT_AN_END, more)
        return "<table>\n" + "\n".join(lines) + "\n</table>"

    def _ends(self) -> tuple[Sequence[int], int]:
        """Return the rows that are shown, and the number of rows that are omitted."""
        rows = range(len(self))
        if len(rows) <= _MOST_ROWS:
            return rows, 0
        return [*rows[:_AT_AN_END], *rows[-_AT_AN_END:]], len(rows) - 2 * _AT_AN_END

    def _lines(self, rows: Sequence[int]) -> list[str]:
        return ["  ".join(cells).rstrip() for cells in self._cells(rows)]

    def _cells(self, rows: Sequence[int]) -> list[tuple[str, ...]]:
        """Return the names of the columns, then some rows; a column is padded to one width."""
        columns = (_texts(name, column, rows) for name, column in self._columns.items())
        return list(zip(*columns, strict=True))


def _html_row(kind: str, cells: Sequence[str]) -> str:
    texts = (escape(cell.strip()) for cell in cells)
    return "<tr>" + "".join(f"<{kind}>{text}</{kind}>" for text in texts) + "</tr>"


def _checked(name: str, column: Sequence[Cell]) -> tuple[Cell, ...]:
    """Validate the values of a column, and return them with one type."""
    values = tuple(column)
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return tuple(None if value is None else float(value) for value in values)
    if len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        came = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"column {name!r} has {came}; a column has one kind of values: str, int, float or "
            "bool, and None.\n    Use tensor.tolist() for a tensor of one axis."
        )
    return values


def _jsonable(value: Cell) -> Cell:
    return None if isinstance(value, float) and not isfinite(value) else value


def _texts(name: str, column: tuple[Cell, ...], rows: Sequence[int]) -> list[str]:
    """Return the name and the selected cells of a column, padded to one width.

    Numbers are aligned to the right.
    """
    values = [column[row] for row in rows]
    is_text = any(isinstance(value, str) for value in values)
    pattern = _float_pattern(column)
    texts = [_short(visible(name)), *(_text(value, pattern) for value in values)]
    width = max(map(len, texts))
    return [text.ljust(width) if is_text else text.rjust(width) for text in texts]


def _text(value: Cell, pattern: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return format(value, pattern)
    return _short(visible(value)) if isinstance(value, str) else str(value)


def _float_pattern(column: tuple[Cell, ...]) -> str:
    sizes = [abs(value) for value in column if isinstance(value, float) and isfinite(value)]
    largest = max(sizes, default=0.0)
    return ".4f" if largest == 0 or 0.01 <= largest < 1e6 else ".3e"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
