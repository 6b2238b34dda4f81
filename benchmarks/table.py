"""The results as a plain table."""

from collections.abc import Sequence
from typing import Any

__all__ = ["COLUMNS", "header", "line", "summary"]

COLUMNS = (("case", 44), ("measured", 16), ("quartiles", 13), ("floor", 6), ("goal", 6))
COLUMNS += (("reached", 8), ("others", 7), ("beside", 0))
FAILED = "failed: "


def header() -> str:
    """The names of the columns."""
    return _joined([name for name, _ in COLUMNS])


def line(row: dict[str, Any]) -> str:
    """One result."""
    if "error" in row:
        return _joined([row["case"], FAILED + row["error"]])
    low, high = row["quartiles"]
    reached = {True: "yes", False: "NO", None: ""}[row["reached"]]
    return _joined(
        [
            row["case"],
            f"{row['value']:g} {row['unit']}",
            "" if low is None else f"{low:g} to {high:g}",
            *("" if row[name] is None else f"{row[name]:g}" for name in ("floor", "goal")),
            reached,
            "" if row["others"] is None else f"{row['others']:.0%}",
            row["beside"],
        ]
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many cases were measured, and how many goals reached."""
    goals = [row["reached"] for row in rows if row.get("reached") is not None]
    measured = sum("error" not in row for row in rows)
    text = f"{measured} of {len(rows)} cases measured"
    return text + (f"; {sum(goals)} of {len(goals)} goals reached" if goals else "")


def _joined(cells: Sequence[str]) -> str:
    widths = [width for _, width in COLUMNS]
    return "  ".join(cell.ljust(n) for cell, n in zip(cells, widths, strict=False)).rstrip()
