"""``python -m benchmarks [passes|speed|time|...|start|all]``: measure, show, write."""

import argparse
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import machine, table
from benchmarks.growth import growth, too_long
from benchmarks.progress import Progress
from benchmarks.registry import GROUPS, Job, jobs
from benchmarks.results import Results
from benchmarks.run import row

RESULTS = Path(__file__).parent / "results"
INTERRUPTED = 130  # what a shell reports after Ctrl-C


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("group", nargs="?", default="all", choices=(*GROUPS, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases with TEXT in them")
    parser.add_argument(
        "--length", type=int, metavar="TOKENS", help="at this length, not at the cases' own"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the JSON goes, and the plot beside it; benchmarks/results/<machine>.json, "
        "with --quick nowhere",
    )
    return parser.parse_args(given)


def measured(job: Job, results: Results, quick: bool) -> dict[str, Any]:
    """The row of a job, or why there is none: one failure must not lose the others."""
    group, name, tokens = job.key
    head = {"group": group, "case": name, "tokens": tokens}
    reason = too_long(group, name, tokens or 0, results.rows)
    if reason is not None:
        return {**head, "left_out": reason}
    try:
        return row(job, results.shares, quick)
    except Exception as error:  # noqa: BLE001
        reason = (str(error).splitlines() or [""])[0]
        return {**head, "error": reason or type(error).__name__}


def measure(chosen: list[Job], results: Results, quick: bool) -> list[dict[str, Any]]:
    """Measure, show and write one after the other; Ctrl-C ends it early."""
    rows: list[dict[str, Any]] = []
    progress = Progress(len(chosen))
    numbered = enumerate(chosen)
    for group, some in groupby(numbered, key=lambda one: one[1].case.group):
        print(f"\n{group}\n{table.header()}", flush=True)
        for place, job in some:
            progress.at(place, job)
            try:
                rows.append(measured(job, results, quick))
            finally:
                progress.clear()
            print(table.line(rows[-1]), flush=True)
            if "error" not in rows[-1]:
                results.add(rows[-1])
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """What follows from the rows."""
    for title, lines in (
        ("how it grows", table.growth_lines(growth(rows))),
        ("goals missed", table.missed(rows)),
    ):
        if lines:
            print("\n".join(("", title, *lines)))
    print("\n" + table.summary(rows))


def draw(results: Results) -> None:
    """Put a plot beside the JSON, where there are curves and matplotlib."""
    if results.path is None or not growth(results.rows):
        return
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; pip install 'regard[dev]'")
        return
    from benchmarks.plot import picture

    print(f"plot: {picture(results.rows, results.facts, results.path.with_suffix('.svg'))}")


def main(options: argparse.Namespace) -> int:
    """Measure what was chosen; 1 when something could not be measured."""
    path = options.output or (None if options.quick else RESULTS / machine.file_name())
    results = Results(path)
    print("  ".join(f"{name} {value}" for name, value in results.facts.items()))
    chosen = jobs(options.group, options.case, options.length, options.quick)
    try:
        rows = measure(chosen, results, options.quick)
    except KeyboardInterrupt:
        print(f"\nstopped; what was finished is in {path}" if path else "\nstopped")
        return INTERRUPTED
    report(rows)
    draw(results)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(arguments()))
