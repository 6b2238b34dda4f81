"""``python -m benchmarks.figures``: put the newest results into the README, as its tables."""

import json
from pathlib import Path
from typing import Any

__all__ = ["figures", "with_figures"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores.json"
START, END = "<!-- figures: benchmarks/results -->", "<!-- end of figures -->"


def figures(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = {(row["group"], row["case"]): row for row in results["results"]}
    machine = results["machine"]
    date = max(row["date"] for row in rows.values())
    speed = [case.removesuffix(", randn") for _, case in rows if case.endswith(", randn")]
    eager = [case for _, case in rows if case.startswith("eager")]
    memory = [case for group, case in rows if group == "memory" and "gradient" not in case]
    start_up = [
        f"`{case}` {row['value']:g} s" for (group, case), row in rows.items() if group == "imports"
    ]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, PyTorch {machine['torch']}, {date}:",
        "",
        "| forwards, 8 heads of 8,192 tokens, float32 | `randn` | sharp (x 30) |",
        "| --- | --- | --- |",
        *(
            f"| {case} | {_ratio(rows, f'{case}, randn')} | {_ratio(rows, f'{case}, sharp')} |"
            for case in speed
        ),
        *(f"| *{case}* | *{rows['speed', case]['value']:.2f}* | |" for case in eager),
        "",
        "| MiB added, one head of 32,768 tokens | asked | with its gradient |",
        "| --- | --- | --- |",
        *(
            f"| {case} | {rows['memory', case]['value']:.0f} "
            f"| {rows['memory', f'gradient of {case}']['value']:.0f} |"
            for case in memory
        ),
        "",
        f"Start-up: {'; '.join(start_up)}.",
    ]
    return "\n".join(lines)


def _ratio(rows: dict[tuple[str, str], dict[str, Any]], case: str) -> str:
    row = rows.get(("speed", case))
    return "" if row is None else f"{row['value']:.2f}"


def with_figures(text: str, results: dict[str, Any]) -> str:
    """The README with the results between its two marks."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n\n{figures(results)}\n\n{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text(), json.loads(RESULTS.read_text())))
