"""All sides over all lengths, one head: seconds, memory, and how fast both grow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import linear_regression
from typing import Any

from benchmarks.case import Case, Effort, LeftOut, Measured
from benchmarks.memory import ADDED_MIB
from benchmarks.meter import MIB, added, available, warm_up
from benchmarks.sides import SIDES, Side, forward
from benchmarks.tensors import random_inputs
from benchmarks.turns import beside_forward, seconds

__all__ = ["CASES", "LIMITS", "exponent", "growth", "too_long"]

LENGTHS = (512, 2048, 8192, 32_768, 131_072)
# Seconds that one answer may take, by the square of the length from the one before; it is timed
# several times and beside a forward, but its memory is measured once.
LIMITS = {"time": 20, "memory": 30}


def check_memory(dense: int, tokens: int) -> None:
    """Leave out what would not fit."""
    gib, free = dense * tokens**2 * 4 / MIB / 1024, available() / 1024
    if gib > 0.8 * free:
        raise LeftOut(f"{gib:,.0f} GiB for {dense} dense matrices; {free:.0f} GiB are free")


def too_long(group: str, name: str, tokens: int, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a case is left out, by the time its side took at shorter lengths."""
    timed = {
        row["tokens"]: row["value"]
        for row in rows
        if row["group"] == "time" and row["case"] == name and "value" in row
    }
    shorter = max((length for length in timed if length < tokens), default=None)
    if group not in LIMITS or shorter is None:
        return None
    expected = timed[shorter] * (tokens / shorter) ** 2
    limit = LIMITS[group]
    return f"about {expected:.0f} s; the limit is {limit} s" if expected > limit else None


def time_case(name: str, side: Side) -> Case:
    """Seconds of one answer, with a fused forward in turns with it."""

    def measure(effort: Effort) -> Measured:
        check_memory(side.dense, effort.tokens)
        inputs = random_inputs(effort.tokens, 1)
        works: list[Any] = []
        prepared_s = seconds(lambda: works.append(side.prepare(inputs)))
        measured = beside_forward(works[0], forward()(inputs), effort.repetitions)
        note = f"compiled in {prepared_s:.2g} s" if side.compiles else ""
        return replace(measured, beside=note)

    return Case("time", name, "s", measure, LENGTHS)


def memory_case(name: str, side: Side) -> Case:
    """MiB that one answer adds to a process that has the inputs, and has compiled."""

    def measure(effort: Effort) -> Measured:
        check_memory(side.dense, effort.tokens)
        inputs = random_inputs(effort.tokens, 1)
        warm_up()
        mib = added(side.prepare(inputs))
        note = f"the matrix {effort.tokens**2 * 4 / MIB:,.0f} MiB"
        return Measured(mib, 1, mib, mib, beside=note)

    goal = ADDED_MIB if name.startswith("regard") else None
    return Case("memory", name, "MiB", measure, LENGTHS, goal)


def exponent(points: Mapping[float, float]) -> float | None:
    """The power of the length by which a value grows: least squares through the logarithms.

    None for fewer than two lengths with a value above 0.
    """
    logs = [(log(length), log(value)) for length, value in points.items() if value > 0]
    if len(logs) < 2:
        return None
    return linear_regression(*zip(*logs, strict=True)).slope


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each side that was measured at two lengths or more: how it grows, and over what."""
    curves: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        if (row["group"], row["case"]) in CURVES and "value" in row:
            curves.setdefault((row["group"], row["case"]), {})[row["tokens"]] = row["value"]
    return [
        {
            "group": group,
            "case": case,
            "exponent": round(power, 2),
            "tokens": [min(points), max(points)],
        }
        for (group, case), points in curves.items()
        if (power := exponent(points)) is not None
    ]


CASES = (
    *(time_case(name, side) for name, side in SIDES.items()),
    *(memory_case(name, side) for name, side in SIDES.items()),
)
CURVES = {(case.group, case.name) for case in CASES}
