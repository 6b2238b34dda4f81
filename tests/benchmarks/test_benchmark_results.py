"""What a results file, its picture and the README say of the benchmarks."""

import importlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Modules:
    """benchmarks.<name>, imported when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return Modules()


def a_row(**changed: Any) -> dict[str, Any]:
    """A row of a results file."""
    row = {
        "group": "time",
        "case": "regard: entropy",
        "tokens": 512,
        "value": 0.5,
        "unit": "s",
        "quartiles": [0.4, 0.6],
        "repetitions": 7,
        "forwards": 1.1,
        "floor": None,
        "goal": None,
        "reached": None,
        "others": 0.01,
        "beside": "",
        "date": "2026-11-21",
        "commit": "1234567",
    }
    return row | changed


# Growth


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_exponent_of_a_power_is_found(power: float, benchmarks: Any) -> None:
    points = {length: 0.003 * length**power for length in (512, 2048, 8192, 32_768)}
    assert benchmarks.growth.exponent(points) == pytest.approx(power)


def test_the_exponent_is_the_slope_of_least_squares(benchmarks: Any) -> None:
    # Through (0, 0), (1, 1), (2, 5) in powers of 2 goes the slope 5/2.
    assert benchmarks.growth.exponent({1: 1, 2: 2, 4: 32}) == pytest.approx(2.5)


@pytest.mark.parametrize("points", [{}, {512: 1.0}, {512: 0.0, 2048: 1.0}])
def test_fewer_than_two_lengths_have_no_exponent(points: dict[int, float], benchmarks: Any) -> None:
    assert benchmarks.growth.exponent(points) is None


def test_each_side_has_the_exponent_of_its_own_group(benchmarks: Any) -> None:
    rows = [
        a_row(group=group, tokens=n, value=float(n) ** power)
        for group, power in (("time", 2), ("memory", 1))
        for n in (512, 2048)
    ]
    assert benchmarks.growth.growth([*rows, a_row(group="speed", case="entropy, randn")]) == [
        {"group": "time", "case": "regard: entropy", "exponent": 2.0, "tokens": [512, 2048]},
        {"group": "memory", "case": "regard: entropy", "exponent": 1.0, "tokens": [512, 2048]},
    ]


def test_what_would_take_too_long_is_left_out_with_the_limit(benchmarks: Any) -> None:
    rows = [a_row(tokens=512, value=9.0), a_row(tokens=2048, value=1.5)]
    said = benchmarks.growth.too_long("time", "regard: entropy", 8192, rows)
    assert said == "about 24 s; the limit is 20 s"
    assert benchmarks.growth.too_long("memory", "regard: entropy", 8192, rows) is None
    assert benchmarks.growth.too_long("time", "regard: topk(8)", 8192, rows) is None


def test_what_would_not_fit_is_left_out_with_its_size(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.growth, "available", lambda: 20 * 1024)
    benchmarks.growth.check_memory(3, 32_768)
    with pytest.raises(benchmarks.case.LeftOut, match="192 GiB for 3 dense matrices; 20 GiB"):
        benchmarks.growth.check_memory(3, 131_072)


# The file

FACTS = {
    **dict.fromkeys(("processor", "instructions", "python", "torch", "regard"), "x"),
    "cores": 2,
    "threads": 2,
}


def a_file(*rows: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"machine": FACTS, "results": list(rows), "growth": []} | changed


LEFT_OUT = {
    name: value
    for name, value in a_row().items()
    if name in ("group", "case", "tokens", "date", "commit")
} | {"left_out": "too long"}


def test_a_good_file_has_no_faults(benchmarks: Any) -> None:
    assert benchmarks.results.faults(a_file(a_row(), LEFT_OUT)) == []


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        pytest.param({"machine": FACTS, "results": []}, "the file has", id="no growth"),
        pytest.param(a_file(machine=FACTS | {"host": "x"}), "machine has ['host']", id="host"),
        pytest.param(a_file(a_row(value="1")), "row 0: value is '1'", id="text for a number"),
        pytest.param(a_file(a_row(value=True)), "row 0: value is True", id="bool for a number"),
        pytest.param(a_file(a_row(path="/")), "row 0 has ['path']", id="another key"),
        pytest.param(a_file(a_row(value=float("nan"))), "are no numbers", id="nan"),
        pytest.param(a_file(a_row(date="today")), "date is 'today'", id="date"),
        pytest.param(a_file(LEFT_OUT | {"left_out": None}), "left_out is None", id="no reason"),
        pytest.param(a_file(a_row(goal=0.4, reached=True)), "reached is True", id="not reached"),
        pytest.param(
            a_file(a_row(), a_row(tokens=2048)), "growth is not that of the rows", id="growth"
        ),
    ],
)
def test_a_fault_of_a_file_is_seen(written: dict[str, Any], fault: str, benchmarks: Any) -> None:
    (found,) = benchmarks.results.faults(written)
    assert fault in found


def test_the_committed_results_fit_the_schema(benchmarks: Any) -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        assert benchmarks.results.faults(json.loads(path.read_text())) == []


def test_a_case_with_its_own_unit_has_a_line_with_a_column_for_each_length(benchmarks: Any) -> None:
    one = {"case": "query and key", "unit": "unobserved forwards", "goal": 1.05}
    rows = [
        a_row(**one, tokens=2048, value=1.1),
        a_row(**one, tokens=8192, value=1.03),
        a_row(case="file", unit="MB", tokens=8192, value=377.6, goal=400),
    ]
    assert benchmarks.figures.with_units(rows, "watching") == (
        "| watching | unit | 2,048 tokens | 8,192 tokens | goal |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| query and key | unobserved forwards | 1.10 | 1.03 | 1.05 |\n"
        "| file | MB |  | 378 | 400 |"
    )


def test_the_readme_quotes_the_committed_results(benchmarks: Any) -> None:
    figures = benchmarks.figures
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert figures.with_figures(readme, figures.all_results()) == readme


# The picture


def test_the_picture_names_every_curve_beside_its_end(benchmarks: Any, tmp_path: Path) -> None:
    sides = list(benchmarks.sides.SIDES)
    rows = [
        a_row(case=case, tokens=n, value=n / 512 + place / 100)
        for place, case in enumerate(sides)
        for n in (512, 2048)
    ]
    figure = benchmarks.plot.pyplot.figure()
    axes = figure.add_subplot()
    benchmarks.plot.panel(axes, "time", "seconds", rows)
    named = {text.get_text().split(", $")[0] for text in axes.texts}
    assert named == {side.removeprefix("regard, in ") for side in sides}
    heights = sorted(text.xyann[1] for text in axes.texts)
    gaps = [b - a for a, b in pairwise(heights)]
    assert min(gaps) == pytest.approx(benchmarks.plot.LETTER)
    benchmarks.plot.pyplot.close(figure)


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        pytest.param([], [], id="none"),
        pytest.param([0.1, 0.5], [0.1, 0.5], id="far apart already"),
        pytest.param([0.5, 0.5], [0.45, 0.55], id="two at one place"),
        pytest.param([0.3, 0.45, 0.45], [0.3, 0.4, 0.5], id="a group that meets its neighbour"),
        pytest.param([-0.2, 0.0, 1.2], [0.0, 0.1, 1.0], id="within the panel"),
    ],
)
def test_labels_move_as_little_as_needed(
    heights: list[float], placed: list[float], benchmarks: Any
) -> None:
    assert benchmarks.plot.apart(heights, 0.1) == pytest.approx(placed)
