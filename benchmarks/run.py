"""Measure a case in a process of its own, so that no other leaves it memory or warm caches."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import others
from benchmarks.case import Case
from benchmarks.registry import chosen

__all__ = ["row"]

ROOT = Path(__file__).parent.parent


def row(case: Case, quick: bool) -> dict[str, Any]:
    """One line of the results; a quick run stays in this process, and reaches or misses no goal."""
    with others.watch() as seen:
        measured = asdict(case.measure(True)) if quick else in_own_process(case)
    value, goal = measured["value"], case.goal
    return {
        "group": case.group,
        "case": case.name,
        "value": significant(value),
        "unit": case.unit,
        "quartiles": [significant(measured[end]) for end in ("low", "high")],
        "floor": case.floor,
        "goal": goal,
        "reached": None if goal is None or quick else value <= goal,
        "others": significant(seen.share),
        "beside": measured["beside"],
    }


def in_own_process(case: Case, *options: str) -> dict[str, Any]:
    """What a fresh process measures.

    Raises:
        RuntimeError: it ended with an error, whose last line is in the message.
    """
    command = [sys.executable, "-m", "benchmarks.run", case.group, case.name, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{case.name} ended with code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def significant(number: float | None) -> float | None:
    """Three digits: more would be noise."""
    return None if number is None else float(f"{number:.3g}")


if __name__ == "__main__":
    group, name, *rest = sys.argv[1:]
    (only,) = [case for case in chosen(group) if case.name == name]
    print(json.dumps(asdict(only.measure("--quick" in rest))))
