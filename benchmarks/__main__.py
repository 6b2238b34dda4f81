"""``python -m benchmarks [speed|memory|imports|all] [--quick]``: measure, show, write."""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, table
from benchmarks.case import Case
from benchmarks.registry import CASES, GROUPS, chosen
from benchmarks.run import row

RESULTS = Path(__file__).parent / "results"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("group", nargs="?", default="all", choices=(*GROUPS, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases with TEXT in them")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the JSON goes; benchmarks/results/<machine>.json, with --quick nowhere",
    )
    return parser.parse_args(given)


def measured(case: Case, quick: bool) -> dict[str, Any]:
    """The row of a case, or why there is none: one failure must not lose the others."""
    try:
        return row(case, quick)
    except Exception as error:  # noqa: BLE001
        reason = (str(error).splitlines() or [""])[0]
        return {"group": case.group, "case": case.name, "error": reason or type(error).__name__}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the rows in the file, in the place of older ones of the same cases.

    Each has its date and commit. Rows of another machine or of other versions of Python and PyTorch
    are dropped: they cannot stand in one table.
    """
    facts = machine.description()
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = old.get("results", []) if old.get("machine") == facts else []
    when = {"date": datetime.now(UTC).date().isoformat(), "commit": machine.commit()}
    rows = [{**row, **when} for row in rows]
    by_case = {(row["group"], row["case"]): row for row in [*kept, *rows]}
    known = [(case.group, case.name) for case in CASES]
    results = [by_case[case] for case in known if case in by_case]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


def main(options: argparse.Namespace) -> int:
    """Measure what was chosen; 1 when something could not be measured."""
    print("  ".join(f"{name} {value}" for name, value in machine.description().items()))
    rows: list[dict[str, Any]] = []
    for group in GROUPS:
        for place, case in enumerate(chosen(group, options.case)):
            if options.group not in ("all", group):
                break
            if place == 0:
                print(f"\n{group}\n{table.header()}", flush=True)
            rows.append(measured(case, options.quick))
            print(table.line(rows[-1]), flush=True)
    print("\n" + table.summary(rows))
    path = options.output or (None if options.quick else RESULTS / machine.file_name())
    if path is not None:
        write(path, rows)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(arguments()))
