"""``python -m benchmarks.figures``: write the committed results into benchmarks/README.md."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import GROUPS
from benchmarks.results import total

__all__ = ["figures", "with_figures"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- figures: benchmarks/results -->", "<!-- end of figures -->"
KINDS = {"randn": "`randn`", "sharp": "sharp (x 30)"}

Row = Mapping[str, Any]


def figures(results: Mapping[str, Any]) -> str:
    """The results of one machine as Markdown."""
    rows: list[Row] = [row for row in results["results"] if "value" in row]
    machine = results["machine"]
    by_group = {group: [row for row in rows if row["group"] == group] for group in GROUPS}
    date = max(row["date"] for row in rows)
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, PyTorch {machine['torch']}, {date}:",
        questions([row for row in by_group["speed"] if row["unit"] == "forwards"]),
        others([row for row in by_group["speed"] if row["unit"] != "forwards"]),
        adding(by_group["parts"]),
        over_lengths(by_group["time"], results["growth"], "seconds, one head"),
        over_lengths(by_group["memory"], results["growth"], "MiB added, one head"),
        with_units(by_group["observe"], "watching SmolLM2-135M"),
        with_units(by_group["blocks"], "watching four blocks, 8 heads of 64, float32"),
        with_units(by_group["outputs"], "lazy attentions of transformers"),
        with_units(by_group["page"], "the page"),
        "; ".join(f"`{row['case']}` {row['value']:g} s" for row in by_group["start"]),
    ]
    return "\n\n".join(part for part in parts if part)


def all_results() -> list[Mapping[str, Any]]:
    """The results of each machine, the one with most of them first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted(found, key=lambda results: -len(results["results"]))


def questions(rows: Sequence[Row]) -> str:
    """A line for each question at each length, a column for each kind of scores."""
    cells = {(*split(row), row["tokens"]): row["value"] for row in rows}
    last = {(split(row)[0], row["tokens"]): row for row in rows}
    return markdown(
        ["forwards, 8 heads", "tokens", *KINDS.values(), "goal", "floor"],
        [
            [name, f"{n:,}", *(shown(cells.get((name, kind, n))) for kind in KINDS), *bounds(row)]
            for (name, n), row in last.items()
        ],
    )


def others(rows: Sequence[Row]) -> str:
    """A line for each case that has a peer of its own."""
    return markdown(
        ["against another peer", "tokens", "measured", "goal", "floor"],
        [
            [
                split(row)[0],
                "" if row["tokens"] is None else f"{row['tokens']:,}",
                f"{shown(row['value'])} {row['unit']}",
                *bounds(row),
            ]
            for row in rows
        ],
    )


def adding(rows: Sequence[Row]) -> str:
    """A line for each question of a pass that has them all."""
    return markdown(
        [
            "extra cost of adding this statistic, in forwards (one thread)",
            "tokens",
            "measured",
            "floor",
        ],
        [
            [
                row["case"].removesuffix(" adds"),
                f"{row['tokens']:,}",
                shown(row["value"]),
                f"{total(row['floor']):.2f}",
            ]
            for row in rows
        ],
    )


def over_lengths(rows: Sequence[Row], growth: Sequence[Row], title: str) -> str:
    """A line for each side, a column for each length, and how it grows."""
    cells = {(row["case"], row["tokens"]): row["value"] for row in rows}
    columns = sorted({row["tokens"] for row in rows})
    powers = {(curve["group"], curve["case"]): curve["exponent"] for curve in growth}
    sides = {row["case"]: powers.get((row["group"], row["case"])) for row in rows}
    return markdown(
        [title, *(f"{tokens:,}" for tokens in columns), "exponent of growth"],
        [
            [side, *(shown(cells.get((side, tokens))) for tokens in columns), shown(power)]
            for side, power in sides.items()
        ],
    )


def with_units(rows: Sequence[Row], title: str) -> str:
    """A line for each case, with its own unit, a column for each length."""
    cells = {(row["case"], row["tokens"]): row["value"] for row in rows}
    columns = sorted({row["tokens"] for row in rows})
    units = {row["case"]: row["unit"] for row in rows}
    goals = {case: [row["goal"] for row in rows if row["case"] == case] for case in units}
    return markdown(
        [title, "unit", *(f"{tokens:,} tokens" for tokens in columns), "goal"],
        [
            [
                case,
                unit,
                *(shown(cells.get((case, tokens))) for tokens in columns),
                " / ".join(map(shown, dict.fromkeys(goals[case]))),
            ]
            for case, unit in units.items()
        ],
    )


def split(row: Row) -> tuple[str, str]:
    """What is asked, and of which kind of scores."""
    for kind in KINDS:
        if row["case"].endswith(f", {kind}"):
            return row["case"].removesuffix(f", {kind}"), kind
    return row["case"], ""


def bounds(row: Row) -> list[str]:
    """Goal and floor."""
    return [shown(row["goal"]), "" if row["floor"] is None else f"{total(row['floor']):.2f}"]


def shown(value: float | None) -> str:
    """A number in a cell."""
    if value is None:
        return ""
    digits = next((n for n, least in ((0, 100), (1, 10), (2, 0.1)) if value >= least), None)
    return f"{value:.2g}" if digits is None else f"{value:,.{digits}f}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; nothing where it has no lines."""
    if not lines:
        return ""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def with_figures(text: str, machines: Sequence[Mapping[str, Any]]) -> str:
    """The README with the results between its two marks."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    tables = "\n\n".join(map(figures, machines))
    return f"{before}{START}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "benchmarks" / "README.md"
    readme.write_text(with_figures(readme.read_text(), all_results()))
