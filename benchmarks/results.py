"""The results file: one machine, its rows, how its sides grow; and what a file has to be."""

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.growth import growth
from benchmarks.registry import CASES

__all__ = ["Results", "faults", "total"]

Row = dict[str, Any]

NUMBER = (int, float)
MISSING = type(None)
FACTS = {
    **dict.fromkeys(("processor", "instructions", "python", "torch", "regard"), str),
    **dict.fromkeys(("cores", "threads"), int),
}
WHERE = {"group": str, "case": str, "tokens": (int, MISSING), "date": str, "commit": str}
LEFT_OUT = {**WHERE, "left_out": str}
MEASURED = {
    **WHERE,
    "value": NUMBER,
    "unit": str,
    "quartiles": list,
    "repetitions": int,
    "forwards": (*NUMBER, MISSING),
    "floor": (dict, MISSING),
    "goal": (*NUMBER, MISSING),
    "reached": (bool, MISSING),
    "others": (*NUMBER, MISSING),
    "beside": str,
}


class Results:
    """The rows of a file, written anew after each: what is finished is kept, come what may.

    Rows of another machine or of other versions of Python and PyTorch are dropped: they cannot
    stand in one table.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.facts = machine.description()
        self.when = {"date": datetime.now(UTC).date().isoformat(), "commit": machine.commit()}
        old: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
        kept: list[Row] = old.get("results", []) if old.get("machine") == self.facts else []
        self._rows = {_key(row): row for row in kept}

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the registry; what it no longer knows is left out."""
        order = {(case.group, case.name): place for place, case in enumerate(CASES)}
        known = [row for row in self._rows.values() if (row["group"], row["case"]) in order]
        return sorted(known, key=lambda row: (order[row["group"], row["case"]], row["tokens"] or 0))

    @property
    def shares(self) -> dict[str, float]:
        """What each pass takes, in forwards."""
        return {
            row["case"]: row["value"]
            for row in self.rows
            if row["group"] == "passes" and "value" in row
        }

    def add(self, row: Row) -> None:
        """Put it in the place of the older row of the same case and length, and write."""
        self._rows[_key(row)] = {**row, **self.when}
        if self.path is None:
            return
        rows = self.rows
        written = {"machine": self.facts, "results": rows, "growth": growth(rows)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(written, indent=1) + "\n")
        beside.replace(self.path)


def _key(row: Row) -> tuple[str, str, int | None]:
    return row["group"], row["case"], row["tokens"]


def total(floor: Mapping[str, float]) -> float:
    """The floor in one number."""
    return round(sum(floor.values()), 3)


def faults(written: Mapping[str, Any]) -> list[str]:
    """What is wrong with the content of a results file; empty for a good one."""
    if set(written) != {"machine", "results", "growth"}:
        return [f"the file has {sorted(written)}"]
    problems = _misfits("machine", written["machine"], FACTS)
    for place, row in enumerate(written["results"]):
        name = f"row {place}"
        wrong = _misfits(name, row, LEFT_OUT if "left_out" in row else MEASURED)
        problems += wrong or _contradictions(name, row)
    if not problems and growth(written["results"]) != written["growth"]:
        problems.append("growth is not that of the rows")
    return problems


def _misfits(name: str, found: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    if set(found) != set(kinds):
        return [f"{name} has {sorted(set(found) ^ set(kinds))} too many or too few"]
    return [
        f"{name}: {key} is {found[key]!r}"
        for key, kind in kinds.items()
        if not isinstance(found[key], kind) or (isinstance(found[key], bool) and key != "reached")
    ]


def _contradictions(name: str, row: Row) -> list[str]:
    try:
        date.fromisoformat(row["date"])
    except ValueError:
        return [f"{name}: date is {row['date']!r}"]
    if "left_out" in row:
        return []
    numbers = [row["value"], *row["quartiles"], *(row["floor"] or {}).values()]
    if not all(isinstance(number, NUMBER) and isfinite(number) for number in numbers):
        return [f"{name}: {numbers} are no numbers"]
    if row["reached"] is not None and row["reached"] != (row["value"] <= row["goal"]):
        return [f"{name}: reached is {row['reached']}, {row['value']} of at most {row['goal']}"]
    return []
