"""The benchmarks run and write what they say; nothing here asserts a time."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

Results = Callable[..., tuple[dict[str, Any], str]]
ROOT = Path(__file__).parents[2]


class Modules:
    """benchmarks.<name>, imported when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return Modules()


@pytest.fixture
def command(benchmarks: Any) -> Any:
    """The module behind ``python -m benchmarks``."""
    return benchmarks.__main__


@pytest.fixture
def results(
    command: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Results:
    """Runs what is asked at tiny size; gives what was written and what was shown.

    FlexAttention takes many seconds to compile, so it finds no compiler here; a slow test runs it.
    """
    monkeypatch.setattr("shutil.which", lambda _: None)

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "results.json"
        assert command.main(command.arguments([*arguments, "--quick", "--output", str(path)])) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


# Every case runs

MAY_BE_LEFT_OUT = {
    "no C++ compiler, which FlexAttention needs on a CPU",
    "not installed: pykeops",
    "not installed: attnread",
    "no model: run python -m benchmarks.smollm2, or set SMOLLM2",
}


@pytest.mark.parametrize(
    "group",
    [
        *("passes", "parts", "speed", "time"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("memory", "observe")),
    ],
)
def test_every_case_runs_and_gives_finite_numbers(
    group: str, results: Results, benchmarks: Any
) -> None:
    written, shown = results(group)
    rows = written["results"]
    assert benchmarks.results.faults(written) == []
    assert {row["group"] for row in rows} == {group}
    assert {row["case"] for row in rows} == {
        case.name for case in benchmarks.registry.CASES if case.group == group
    }
    measured = [row for row in rows if "value" in row]
    assert all(isfinite(row["value"]) for row in measured)
    assert {row["left_out"] for row in rows if "left_out" in row} <= MAY_BE_LEFT_OUT
    assert all(row["case"] in shown for row in rows)
    assert f"{len(measured)} of {len(rows)} cases measured" in shown


def test_what_moves_on_the_screen_needs_chromium(results: Results) -> None:
    written, _ = results("page", "--case", "a frame of")
    assert {row["left_out"] for row in written["results"]} == {"no Chromium"}


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize("case", ["a frame of dragging", "a frame of zooming"])
def test_frames_of_the_server_and_of_the_file_are_measured(case: str) -> None:
    line = [sys.executable, "-m", "benchmarks", "page", "--quick", "--case", case]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "2 of 2 cases measured" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="FlexAttention needs a C++ compiler")
def test_flex_attention_is_compiled_and_measured() -> None:
    line = [sys.executable, "-m", "benchmarks", "speed", "--quick", "--case", "FlexAttention"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 of 1 cases measured" in done.stdout


@pytest.mark.full
def test_the_import_is_measured(results: Results) -> None:
    written, _ = results("start", "--case", "import regard")
    assert [row["unit"] for row in written["results"]] == ["s"]


@pytest.mark.full
def test_a_case_is_measured_in_a_process_of_its_own(benchmarks: Any) -> None:
    (job,) = benchmarks.registry.jobs("memory", "fused forward", length=64)
    measured = benchmarks.run.in_own_process(job)
    assert measured["beside"] == "the matrix 0 MiB"


@pytest.mark.full
def test_the_command_runs_from_the_shell() -> None:
    line = [sys.executable, "-m", "benchmarks", "memory", "--quick", "--case", "gradient of topk"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 of 1 cases measured" in done.stdout
    assert "[1/1, 0:00] gradient of topk(8), 64 tokens ..." in done.stderr


@pytest.mark.full
def test_the_price_of_a_question_about_a_picture_is_measured() -> None:
    line = [sys.executable, "-m", "benchmarks.pictures", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1,024 image tokens, 12 heads, 2 of keys, of 128 numbers\n")
    assert done.stdout.count(" text tokens to the picture, all heads") == 2


# The sides do the same work


@pytest.mark.parametrize("name", ["EVERYTHING", "CAUSAL", "PADDING", "WINDOW"])
def test_every_side_means_the_same_by_a_mask(name: str, benchmarks: Any) -> None:
    pattern = getattr(benchmarks.patterns, name)
    inputs = benchmarks.tensors.random_inputs(611, 2)
    ours = benchmarks.sides.asked(lambda matrix, value: matrix @ value, pattern)(inputs)()
    torch.testing.assert_close(ours, benchmarks.sides.forward(pattern)(inputs)())


def test_flex_attention_means_the_same_by_a_window(benchmarks: Any) -> None:
    index = torch.arange(600)
    theirs = benchmarks.sides.near(None, None, index[:, None], index)
    assert torch.equal(theirs, benchmarks.patterns.WINDOW.theirs(600))


def test_eager_gives_the_same_statistics(benchmarks: Any) -> None:
    inputs = benchmarks.tensors.random_inputs(128, 2)
    ask = benchmarks.questions.QUESTIONS[benchmarks.questions.ALL].ask
    ours = benchmarks.sides.asked(ask)(inputs)()
    theirs = benchmarks.sides.eager_statistics(inputs)()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tuple(one), tuple(other))


# Goals and floors


@pytest.mark.parametrize(
    ("case", "tokens", "goal"),
    [
        ("A @ value, sharp", 4096, 1.02),
        ("A @ value, padding, randn", 4096, 1.02),
        ("logsumexp, randn", 4096, 0.7),
        ("segments(16), sharp", 16_384, 0.8),
        ("topk(8), randn", 16_384, 0.9),
        ("topk(64), sharp", 4096, 1.0),
        ("entropy, causal, randn", 16_384, 0.54),
        ("sum(-2), causal, randn", 4096, 0.58),
        ("output and five statistics, randn", 4096, 1.3),
        ("output and five statistics, sharp", 16_384, 1.4),
        ("output and five statistics, causal, randn", 4096, 1.35),
        ("output and five statistics, bfloat16, randn", 16_384, 1.5),
        ("A @ value, window of 256, against FlexAttention, randn", 16_384, 0.5),
        ("backward of entropy, randn", 16_384, 1.9),
        ("A @ value, 3 tokens, one head", None, 30),
        ("every reduction in one pass", 131_072, 1536),
        ("query and key of all heads, bfloat16", 2048, 1.1),
        ("query and key of all heads, bfloat16", 8192, 1.05),
        ("query and key of all heads, float32", 8192, 1.05),
        ("four reductions of all heads, bfloat16", 8192, 1.5),
        ("four reductions of all heads, float32", 2048, 1.5),
        ("file of query and key, bfloat16", 8192, 400),
        ("memory, four reductions, bfloat16", 8192, 1024),
    ],
)
def test_a_goal_is_the_one_that_was_agreed(
    case: str, tokens: int | None, goal: float, benchmarks: Any
) -> None:
    (job,) = [
        job
        for job in benchmarks.registry.jobs("all", case)
        if (job.case.name, job.tokens) == (case, tokens)
    ]
    assert job.case.goal_at(tokens) == goal


def measured_as(
    value: float, benchmarks: Any, monkeypatch: pytest.MonkeyPatch, shares: dict[str, float]
) -> dict[str, Any]:
    """The row of topk(8), goal 0.8, where a full run has measured this."""
    outcome = benchmarks.case.Measured(value, 7, value, value)
    monkeypatch.setattr(benchmarks.run, "in_own_process", lambda _: asdict(outcome))
    job, *_ = benchmarks.registry.jobs("speed", "topk(8), randn")
    return benchmarks.run.row(job, shares, quick=False)


SHARES = {"scores": 0.4, "exp": 0.2}


def test_a_goal_that_is_missed_is_said_to_be_missed_with_its_floor(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = measured_as(1.3, benchmarks, monkeypatch, SHARES)
    assert row["reached"] is False
    assert " NO " in benchmarks.table.line(row)
    assert benchmarks.table.summary([row]).endswith("0 of 1 goals reached")
    assert benchmarks.table.missed([row]) == [
        "topk(8), randn at 4,096 tokens: 1.3 forwards, goal 0.8; its floor is 0.6 = "
        "scores 0.4 + exp 0.2"
    ]


def test_a_goal_that_is_reached_is_said_to_be_reached(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = measured_as(0.8, benchmarks, monkeypatch, SHARES)
    assert " yes " in benchmarks.table.line(row)
    assert benchmarks.table.summary([row]).endswith("1 of 1 goals reached")
    assert benchmarks.table.missed([row]) == []


@pytest.mark.parametrize(
    ("shares", "end"),
    [
        pytest.param(SHARES | {"scores": 0.9}, ", which is above the goal", id="above the goal"),
        pytest.param({}, "goal 0.8; its floor is not known", id="passes not measured"),
    ],
)
def test_a_floor_says_whether_the_goal_can_be_reached(
    shares: dict[str, float], end: str, benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = benchmarks.table.missed([measured_as(1.3, benchmarks, monkeypatch, shares)])
    assert line.endswith(end)


def test_a_pass_that_is_needed_twice_counts_twice(benchmarks: Any) -> None:
    floor = benchmarks.case.passes("scores", "product", "product")
    assert floor(64, {"scores": 0.4, "product": 0.5}) == {"scores": 0.4, "product": 1.0}


def test_the_floor_of_a_causal_question_is_the_share_of_visible_pairs(benchmarks: Any) -> None:
    job, *_ = benchmarks.registry.jobs("speed", "entropy, causal")
    assert job.case.floor(3, {}) == {"pairs that the mask allows": 6 / 9}


def test_floors_come_from_the_passes_that_this_machine_has_measured(results: Results) -> None:
    written, _ = results("passes")
    shares = {row["case"]: row["value"] for row in written["results"]}
    written, _ = results("speed", "--case", "logsumexp, randn")
    (floor,) = [row["floor"] for row in written["results"] if row["group"] == "speed"]
    assert floor == {name: shares[name] for name in ("scores", "exp")}


def test_a_tiny_run_neither_reaches_nor_misses_a_goal(results: Results) -> None:
    written, shown = results("memory", "--case", "gradient of entropy")
    assert {row["reached"] for row in written["results"]} == {None}
    assert "goals" not in shown


# Measuring


def test_the_first_round_warms_up(benchmarks: Any) -> None:
    calls: list[str] = []
    times = benchmarks.turns.in_turns((lambda: calls.append("a"), lambda: calls.append("b")), 2)
    assert calls == ["a", "b"] * 3
    assert [len(column) for column in times] == [2, 2]


def test_long_rounds_are_few_and_the_first_of_them_counts(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.turns, "seconds", lambda work: work())
    assert benchmarks.turns.in_turns((lambda: 5.0, lambda: 7.0), 7) == [[5.0] * 3, [7.0] * 3]


def test_a_ratio_is_that_of_the_medians(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = iter([9.0, 2.0, 3.0, 8.0]), iter([9.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(benchmarks.turns, "seconds", next)
    monkeypatch.setattr(benchmarks.turns, "WARM_S", 100)
    measured = benchmarks.turns.ratio(ours, peer, 3)
    assert (measured.value, measured.low, measured.high) == (1.5, 1.75, 2.0)
    assert measured.repetitions == 3


@pytest.mark.full
def test_memory_that_is_given_back_is_still_seen(benchmarks: Any) -> None:
    def work() -> None:
        torch.ones(2**24).sum()  # 64 MiB

    assert 60 <= benchmarks.meter.added(work) <= 100


# What is written


@pytest.mark.full
def test_a_second_run_keeps_the_rows_it_does_not_replace(results: Results) -> None:
    results("memory", "--case", "gradient of topk")
    written, _ = results("memory", "--case", "gradient of entropy")
    names = [row["case"] for row in written["results"]]
    assert names == ["gradient of entropy", "gradient of topk(8)"]


@pytest.mark.full
def test_rows_of_another_machine_are_dropped(results: Results, tmp_path: Path) -> None:
    results("memory", "--case", "gradient of topk")
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"cores": ', '"cores": 9'))
    written, _ = results("memory", "--case", "gradient of entropy")
    assert [row["case"] for row in written["results"]] == ["gradient of entropy"]


@pytest.mark.full
def test_what_names_the_machine_or_its_folders_is_not_written(
    results: Results, tmp_path: Path
) -> None:
    written, _ = results("memory", "--case", "entropy")
    assert set(written["machine"]) == {
        *("processor", "instructions", "cores", "threads", "python", "torch", "regard")
    }
    hostname = Path("/etc/hostname")
    private = {str(ROOT), str(Path.home()), str(tmp_path)}
    private |= {hostname.read_text().strip()} if hostname.exists() else set()
    text = json.dumps(written)
    assert [name for name in private if len(name) > 3 and name in text] == []


def test_an_interrupt_leaves_what_is_finished(
    command: Any, benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stops(effort: Any) -> Any:
        raise KeyboardInterrupt

    first, second, *_ = benchmarks.registry.jobs("memory", "gradient", quick=True)
    stopped = second._replace(case=replace(second.case, measure=stops))
    monkeypatch.setattr(command, "jobs", lambda *_: [first, stopped])
    path = tmp_path / "results.json"
    assert command.main(command.arguments(["--quick", "--output", str(path)])) == 130
    written = json.loads(path.read_text())
    assert [row["case"] for row in written["results"]] == [first.case.name]


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    command: Any,
    benchmarks: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(effort: Any) -> Any:
        raise OSError("no such meter\nand more")

    job, *_ = benchmarks.registry.jobs("speed", quick=True)
    cases = [replace(job.case, name="broken", measure=fails), replace(job.case, name="whole")]
    monkeypatch.setattr(command, "jobs", lambda *_: [job._replace(case=case) for case in cases])
    assert command.main(command.arguments(["--quick"])) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^broken +64 +failed: no such meter$", shown, re.MULTILINE)
    assert re.search(r"^whole +64 +[\d.]+ forwards", shown, re.MULTILINE)
    assert "1 of 2 cases measured" in shown


def test_an_unknown_group_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.arguments(["sped"])
    assert "invalid choice: 'sped'" in capsys.readouterr().err


def test_a_length_takes_the_place_of_the_cases_own(benchmarks: Any) -> None:
    chosen = benchmarks.registry.jobs("speed", "A @ value", length=32_768)
    assert {job.tokens for job in chosen} == {32_768, None}


def test_no_two_jobs_are_the_same(benchmarks: Any) -> None:
    keys = [job.key for job in benchmarks.registry.jobs("all")]
    assert len(set(keys)) == len(keys)


def test_the_picture_is_drawn_beside_the_results(results: Results, tmp_path: Path) -> None:
    results("time", "--case", "regard")
    path = tmp_path / "results.json"
    rows = json.loads(path.read_text())
    longer = [row | {"tokens": 128} for row in rows["results"]]
    path.write_text(json.dumps(rows | {"results": [*rows["results"], *longer]}))
    _, shown = results("time", "--case", "regard")
    assert f"plot: {tmp_path / 'results.svg'}" in shown
    assert (tmp_path / "results.svg").read_text().startswith("<?xml")
