"""The results in words: a line for each, how the sides grow, which goals were missed and why."""

from collections.abc import Sequence
from typing import Any

from benchmarks.results import total

__all__ = ["growth_lines", "header", "line", "missed", "summary"]

COLUMNS = (("case", 64), ("tokens", 7), ("measured", 19), ("quartiles", 16), ("floor", 6))
COLUMNS += (("goal", 5), ("reached", 7), ("others", 6), ("beside", 0))


def header() -> str:
    """The names of the columns."""
    return _joined([name for name, _ in COLUMNS])


def line(row: dict[str, Any]) -> str:
    """One result."""
    first = [row["case"], "" if row["tokens"] is None else f"{row['tokens']:,}"]
    if "error" in row:
        return _joined([*first, f"failed: {row['error']}"])
    if "left_out" in row:
        return _joined([*first, f"left out: {row['left_out']}"])
    forwards = "" if row["forwards"] is None else f"{row['forwards']:g} forwards"
    return _joined(
        [
            *first,
            f"{row['value']:g} {row['unit']}",
            "{:g} to {:g}".format(*row["quartiles"]) if row["repetitions"] > 1 else "",
            "" if row["floor"] is None else f"{total(row['floor']):g}",
            "" if row["goal"] is None else f"{row['goal']:g}",
            {True: "yes", False: "NO", None: ""}[row["reached"]],
            "" if row["others"] is None else f"{row['others']:.0%}",
            "; ".join(note for note in (forwards, row["beside"]) if note),
        ]
    )


def growth_lines(growth: Sequence[dict[str, Any]]) -> list[str]:
    """How each side grows with the length."""
    return [
        f"{curve['group']:8}{curve['case']:48}length^{curve['exponent']:.2f}"
        "   {:,} to {:,} tokens".format(*curve["tokens"])
        for curve in growth
    ]


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each goal that was missed, with what stands in the way."""
    return [_missed(row) for row in rows if row.get("reached") is False]


def _missed(row: dict[str, Any]) -> str:
    where = "" if row["tokens"] is None else f" at {row['tokens']:,} tokens"
    said = f"{row['case']}{where}: {row['value']:g} {row['unit']}, goal {row['goal']:g}; "
    if row["floor"] is None:
        return said + "its floor is not known"
    parts = " + ".join(f"{name} {share:g}" for name, share in row["floor"].items())
    floor = total(row["floor"])
    above = "" if floor <= row["goal"] else ", which is above the goal"
    return f"{said}its floor is {floor:g} = {parts or 'nothing'}{above}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many cases were measured, and how many goals reached."""
    goals = [row["reached"] for row in rows if row.get("reached") is not None]
    measured = sum("value" in row for row in rows)
    left_out = sum("left_out" in row for row in rows)
    text = f"{measured} of {len(rows)} cases measured"
    text += f", {left_out} left out" if left_out else ""
    return text + (f"; {sum(goals)} of {len(goals)} goals reached" if goals else "")


def _joined(cells: Sequence[str]) -> str:
    widths = [width for _, width in COLUMNS]
    return "  ".join(cell.ljust(n) for cell, n in zip(cells, widths, strict=False)).rstrip()
