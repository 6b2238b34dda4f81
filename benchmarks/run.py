"""Measure a case in a process of its own, so that no other leaves it memory or warm caches."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import others
from benchmarks.case import QUICK, Case, Effort, LeftOut, full
from benchmarks.registry import Job, case_named

__all__ = ["row"]

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600


def row(job: Job, shares: Mapping[str, float], quick: bool) -> dict[str, Any]:
    """One line of the results; a quick run stays in this process, and reaches or misses no goal."""
    case = job.case
    group, name, tokens = job.key
    goal = case.goal_at(tokens)
    head = {"group": group, "case": name, "tokens": tokens}
    with others.watch() as seen:
        measured = measure(case, QUICK) if quick else in_own_process(job)
    if "left_out" in measured:
        return {**head, **measured}
    value = significant(measured["value"])
    return {
        **head,
        "value": value,
        "unit": case.unit,
        "quartiles": [significant(measured[end]) for end in ("low", "high")],
        "repetitions": measured["repetitions"],
        "forwards": significant(measured["forwards"]),
        "floor": floor(case, tokens, shares),
        "goal": goal,
        "reached": None if goal is None or quick else value <= goal,
        "others": significant(seen.share),
        "beside": measured["beside"],
    }


def floor(case: Case, tokens: int | None, shares: Mapping[str, float]) -> dict[str, float] | None:
    """The parts of the floor; None where it is not known, or a pass has not been measured."""
    if case.floor is None:
        return None
    try:
        parts = case.floor(tokens or 0, shares)
    except KeyError:
        return None
    return {name: float(f"{share:.3g}") for name, share in parts.items()}


def in_own_process(job: Job) -> dict[str, Any]:
    """What a fresh process measures.

    Raises:
        RuntimeError: it ended with an error, whose last line is in the message.
    """
    group, name, tokens = job.key
    command = [sys.executable, "-m", "benchmarks.run", group, name, str(tokens or 0)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"stopped after {TIMEOUT_S} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} ended with code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case, effort: Effort) -> dict[str, Any]:
    """What came out, or why nothing was measured."""
    try:
        return asdict(case.measure(effort))
    except LeftOut as reason:
        return {"left_out": str(reason)}


def significant(number: float | None) -> Any:
    """Three digits: more would be noise."""
    return None if number is None else float(f"{number:.3g}")


if __name__ == "__main__":
    group, name, tokens = sys.argv[1:]
    print(json.dumps(measure(case_named(group, name), full(int(tokens)))))
