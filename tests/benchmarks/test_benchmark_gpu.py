"""The GPU's benchmark as far as it goes without one: what it chooses, keeps to, says, writes."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_benchmark import BEHIND, Modules, side, size, taking

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return Modules()


FACTS = {"gpu": "NVIDIA H200", "torch": "2.13.0", "cudnn": "91900", "triton": "3.7.1"}


# Without a GPU


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    line = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "There is no NVIDIA GPU that PyTorch can use, so there is nothing to measure.\n"
    )


def test_without_triton_it_says_what_to_install(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = gpu.__main__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.lacking() == "Triton is not installed: pip install 'regard[gpu]'."


# What is measured


def test_the_length_with_goals_comes_first_and_then_the_shortest(gpu: Any) -> None:
    sizes = gpu.size.sizes()
    lengths = [each.tokens for each in sizes]
    at_goals = lengths[: 2 * 2 * 2]
    assert set(at_goals) == {gpu.size.GOALS_AT[0]}
    rest = lengths[len(at_goals) :]
    assert rest == sorted(rest)
    assert (rest[0], rest[-1], len(set(sizes))) == (2048, 131_072, 7 * 2 * 2 * 2)


@pytest.mark.parametrize("causal", [True, False])
def test_the_flops_are_those_of_the_pairs_that_are_seen(causal: bool, gpu: Any) -> None:
    asked = size(gpu, 5, causal=causal)
    assert asked.pairs == 8 * (15 if causal else 25)
    assert asked.score_flops == 2 * 128 * asked.pairs


def test_inputs_are_bfloat16_and_each_set_is_another(gpu: Any) -> None:
    first, second = gpu.size.inputs(size(gpu, 5), "cpu", sets=2)
    assert [tuple(tensor.shape) for tensor in first] == [(1, 8, 5, 128), *[(1, 2, 5, 128)] * 2]
    assert {tensor.dtype for tensor in first} == {torch.bfloat16}
    assert not torch.equal(first.query, second.query)


@pytest.mark.parametrize(("size_of_one", "sets"), [(2**20, 8), (30 * 2**20, 4), (2**30, 2)])
def test_input_sets_are_more_than_the_cache_holds(size_of_one: int, sets: int, gpu: Any) -> None:
    assert gpu.clock.sets_needed(size_of_one) == sets


def test_the_goals_are_those_that_were_agreed(gpu: Any) -> None:
    assert {side.name: side.goal for side in gpu.sides.SIDES if side.goal is not None} == {
        "logsumexp": 0.6,
        "row statistics": 0.8,
        "logsumexp, column sums": 1.3,
        "logsumexp, 64 x 64 map": 1.3,
        "topk(8)": 1.5,
        "entropy and its gradient": 1.3,
        "column sums and their gradient": 1.5,
        "64 x 64 map and its gradient": 1.5,
        "logsumexp, a new mask_mod": 1.2,
        "logsumexp, a new A | B": 1.2,
        "output and five statistics": 2.5,
    }
    graded = [side for side in gpu.sides.SIDES if side.graded is not None]
    assert {side.peer for side in graded} == {gpu.sides.BOTH}
    assert gpu.size.GOALS_AT == (16_384, 128)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_dense_way_has_the_same_answers(causal: bool, gpu: Any) -> None:
    asked = size(gpu, 128, causal=causal)
    (given,) = gpu.size.inputs(asked, "cpu", sets=1)
    given = type(given)(*(tensor.float() for tensor in given))
    output, *statistics = gpu.sides.dense(given, asked)()
    ours = gpu.sides.everything("sweep")(given, asked)()
    torch.testing.assert_close(ours[0], output)
    for one, other in zip(ours[1], statistics, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            torch.testing.assert_close(one.values, other.values)


# The rows, and the budget of time


def test_a_row_has_the_ratio_the_flops_and_the_goal(gpu: Any) -> None:
    asked = gpu.size.Size(16_384, 128, 8, causal=False)
    found = gpu.clock.Timed(0.02, 0.019, 0.022, 10, 2**20, 0.001)
    row = gpu.rows.row_of(side(gpu, "x", goal=1.5, products=2), asked, found, 0.016, 0.016)
    assert row == {
        "side": "x",
        "tokens": 16_384,
        "head_dim": 128,
        "num_kv_heads": 8,
        "causal": False,
        "milliseconds": 20.0,
        "quartiles": [19.0, 22.0],
        "repetitions": 10,
        "queued_ms": 1.0,
        "forwards": 1.25,
        "tflops": 440.0,
        "memory_mib": 1.0,
        "goal": 1.5,
        "reached": True,
        "peer": gpu.sides.FORWARD,
        "of_peer": 1.25,
    }
    assert gpu.report.line(row) == (
        " 16,384  d 128   8 kv heads  full    x"
        + " " * 37
        + "      20 ms  1.25 forwards"
        + " " * 26
        + "440 TFLOP/s         1 MiB  goal 1.5"
    )


def test_a_gradient_has_its_goal_beside_a_backward_pass(gpu: Any) -> None:
    asked = gpu.size.Size(16_384, 128, 8, causal=True)
    found = gpu.clock.Timed(2.0, 2.0, 2.0, 3, 0, 0.1)
    graded = side(gpu, "x", goal=1.5, peer=gpu.sides.BOTH)
    row = gpu.rows.row_of(graded, asked, found, 0.5, 1.6)
    assert (row["forwards"], row["of_peer"], row["reached"]) == (4.0, 1.25, True)
    assert "4 forwards, 1.25 with backward" in gpu.report.line(row)


def test_goals_hold_at_their_size_alone(gpu: Any) -> None:
    found = gpu.clock.Timed(2.0, 2.0, 2.0, 3, 0, 0.1)
    row = gpu.rows.row_of(side(gpu, "x", goal=1.5), size(gpu, 128), found, 1.0, 1.0)
    assert (row["goal"], row["reached"]) == (None, None)


def test_a_missed_goal_is_said(gpu: Any) -> None:
    asked, found = gpu.size.Size(16_384, 128, 8, True), gpu.clock.Timed(2.0, 2.0, 2.0, 3, 0, 0.1)
    row = gpu.rows.row_of(side(gpu, "x", goal=1.5), asked, found, 1.0, 1.0)
    assert gpu.report.line(row).endswith("goal 1.5 MISSED")


def test_a_goal_beside_a_forward_that_failed_is_not_said_to_be_missed(gpu: Any) -> None:
    asked, found = gpu.size.Size(16_384, 128, 8, True), gpu.clock.Timed(2.0, 2.0, 2.0, 3, 0, 0.1)
    row = gpu.rows.row_of(side(gpu, "x", goal=1.5), asked, found, None, None)
    assert (row["forwards"], row["reached"]) == (None, None)
    assert gpu.report.line(row).endswith("goal 1.5")


def test_a_call_that_waits_for_the_cpu_is_said_to(gpu: Any) -> None:
    found = gpu.clock.Timed(2e-4, 2e-4, 2e-4, 3, 0, 2.5e-4)
    row = gpu.rows.row_of(side(gpu, "x"), size(gpu), found, None, None)
    assert (row["milliseconds"], row["queued_ms"]) == (0.2, 0.25)
    assert gpu.report.line(row).endswith("the CPU is the limit")


def measured(gpu: Any, budget_s: float, take: Any, *sides: Any) -> list[dict[str, Any]]:
    """Rows at 64, 128 and 256 tokens, by a clock that goes on by 7 seconds for each look."""
    now = iter(range(0, 1000, 7))
    budget = gpu.clock.Budget(budget_s, lambda: next(now))
    sizes = [size(gpu, tokens) for tokens in (64, 128, 256)]
    return list(gpu.rows.measured(sides, sizes, "cpu", budget, take))


def test_the_ratio_is_to_the_forward_of_the_same_size(gpu: Any) -> None:
    times = {gpu.sides.FORWARD: 2.0, "x": 1.0}
    rows = measured(
        gpu, 900, taking(gpu, times.__getitem__), side(gpu, gpu.sides.FORWARD), side(gpu, "x")
    )
    assert [row.get("forwards") for row in rows[:2]] == [1.0, 0.5]


def test_what_would_take_too_long_is_left_out_and_the_longest_first(gpu: Any) -> None:
    rows = measured(gpu, 900, taking(gpu, lambda _: 0.5), side(gpu, "x"))
    assert [row.get("left_out") for row in rows] == [None, None, None]
    rows = measured(gpu, 900, taking(gpu, lambda _: 1.5), side(gpu, "x"))
    said = [f"about {seconds} s a call; the limit is 4 s" for seconds in (6, 24)]
    assert [row.get("left_out") for row in rows] == [None, *said]
    rows = measured(gpu, 30, taking(gpu, lambda _: 0.4), side(gpu, "x"))
    assert [row.get("left_out") for row in rows] == [None, None, "the time is up"]


@pytest.mark.parametrize(
    ("budget_s", "options"), [(10, {}), (60, {"first_s": 60.0})], ids=["ours", "a slow compiler"]
)
def test_what_has_not_been_compiled_needs_time_for_it(
    budget_s: float, options: dict[str, float], gpu: Any
) -> None:
    rows = measured(gpu, budget_s, taking(gpu, lambda _: 0.1), side(gpu, "x", **options))
    assert {row["left_out"] for row in rows} == {"the time is up"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("no kernel\nand more"), "failed: RuntimeError: no kernel"),
        (ValueError(), "failed: ValueError"),
    ],
    ids=["memory", "error", "no text"],
)
def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    error: Exception, said: str, gpu: Any
) -> None:
    def seconds(name: str) -> float:
        if name == "broken":
            raise error
        return 1.0

    rows = measured(gpu, 900, taking(gpu, seconds), side(gpu, "broken"), side(gpu, "whole"))
    assert (rows[0]["left_out"], rows[0]["failed"]) == (said, said.startswith("failed"))
    assert rows[1]["milliseconds"] == 1000
    assert gpu.report.line(rows[0]).endswith(f"left out: {said}")


def test_a_side_is_measured_where_it_can_be(gpu: Any) -> None:
    sides = [side(gpu, "few", lengths=(128,)), side(gpu, "short", longest=64)]
    rows = measured(gpu, 900, taking(gpu, lambda _: 0.1), *sides)
    said = "measured at 128 only", "measured up to 64"
    assert [row.get("left_out") for row in rows] == [said[0], None, None, said[1], said[0], said[1]]


# What is said and written


def rows_of(gpu: Any, *names: str, lengths: Sequence[int] = (64, 128)) -> list[dict[str, Any]]:
    """As if the first took 1 second, the second 2, and so on."""
    rows = list[dict[str, Any]]()
    for tokens in lengths:
        for place, name in enumerate(names):
            asked = gpu.size.Size(tokens, 128, 8, causal=False)
            found = gpu.clock.Timed(1.0 + place, 1.0, 2.0, 3, (1 + place) * 2**20, 0.1)
            rows.append(gpu.rows.row_of(side(gpu, name), asked, found, 1.0, 1.0))
    return rows


def test_the_gain_over_forming_the_matrix_is_said(gpu: Any) -> None:
    rows = rows_of(gpu, gpu.report.OURS, "x", "y", gpu.report.DENSE, lengths=(64,))
    assert gpu.report.against_dense(rows) == [
        "     64  d 128   8 kv heads  full    4.0 times faster than dense, 4 times less memory"
    ]


def test_a_pass_given_the_logsumexp_is_what_is_left_of_both(gpu: Any) -> None:
    names = gpu.sides.FORWARD, "logsumexp", "logsumexp, spans", "logsumexp, transposed product"
    rows = rows_of(gpu, *names, lengths=(2048, 16_384))
    rows[4]["milliseconds"] = 2000.0  # the forward at 16k
    at = " 16,384  d 128   8 kv heads  full    "
    assert gpu.report.given_logsumexp(rows, (16_384, 128)) == [
        f"{at}spans given logsumexp: 0.50 forwards",
        f"{at}transposed product given logsumexp: 1.00 forwards",
    ]


def test_a_logsumexp_under_a_mask_stands_behind_none(gpu: Any) -> None:
    names = [side.name for side in gpu.sides.SIDES if side.name.startswith(gpu.report.GIVEN)]
    rows = rows_of(gpu, gpu.sides.FORWARD, "logsumexp", *names, lengths=(16_384,))
    lines = gpu.report.given_logsumexp(rows, (16_384, 128))
    assert [re.findall(r"full    (.*) given", line) for line in lines] == [[x] for x in BEHIND]


def test_the_share_of_the_peak_is_that_of_the_best_at_the_size_of_the_goals(gpu: Any) -> None:
    rows = rows_of(gpu, "logsumexp", "row statistics", lengths=(16_384,))
    rows[0]["tflops"], rows[1]["tflops"] = 500.0, 300.0
    assert gpu.report.peak_line(rows, 800.0, (16_384, 128)) == (
        "share of the matrix peak: 0.62 of 800 TFLOP/s in the score product (goal 0.6)"
    )
    assert gpu.report.peak_line(rows, 1000.0, (16_384, 128)).endswith("(goal 0.6, MISSED)")
    assert gpu.report.peak_line([], 800.0, (16_384, 128)).endswith("not measured")
    assert gpu.report.peak_line(rows, None, (16_384, 128)).endswith("not measured")


def test_all_of_it_is_written(gpu: Any, tmp_path: Path) -> None:
    path, rows = tmp_path / "new" / "results.json", rows_of(gpu, "x")
    checks = [
        gpu.correctness.Checked("entropy", size(gpu), 1e-7, True),
        gpu.correctness.Checked("max", size(gpu), torch.nan, False),
        gpu.correctness.Checked("topk(8)", size(gpu), None, False, "failed: ValueError"),
    ]
    gpu.report.write(path, FACTS, 790.0, checks, rows)
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert written["machine"] == FACTS
    assert written["matrix_peak_tflops"] == 790.0
    assert [(each["asked"], each["error"], each["failed"]) for each in written["checks"]] == [
        ("entropy", 1e-7, None),
        ("max", None, None),
        ("topk(8)", None, "failed: ValueError"),
    ]
    assert written["results"] == rows
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.full
def test_the_picture_is_drawn(gpu: Any, tmp_path: Path) -> None:
    rows = rows_of(gpu, gpu.sides.FORWARD, "x", lengths=(2048, 4096))
    rows.append({**rows[0], "side": "y", "left_out": "out of memory", "forwards": None})
    path = gpu.plot.picture(rows, FACTS, tmp_path / "results.svg")
    assert path.read_text().startswith("<?xml")


def test_a_file_is_named_after_the_gpu(gpu: Any) -> None:
    assert gpu.report.file_name("NVIDIA H200") == "nvidia-h200.json"


# The whole command, with a GPU that is played


@pytest.fixture
def played(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    command = gpu.__main__
    monkeypatch.setattr(command, "lacking", lambda: None)
    monkeypatch.setattr(command.report, "facts", lambda: FACTS)
    monkeypatch.setattr(command, "peak_tflops", lambda: 790.0)
    monkeypatch.setattr(command, "timed", taking(gpu, lambda _: 0.1))
    monkeypatch.setattr(command, "SIDES", [side(gpu, gpu.sides.FORWARD), side(gpu, "x")])
    monkeypatch.setattr(command, "DEVICE", "cpu")
    monkeypatch.setattr(command, "sizes", lambda lengths: [size(gpu, n) for n in lengths])
    return command


@pytest.mark.full
def test_a_run_checks_measures_writes_and_draws(
    played: Any, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = gpu.correctness.Checked("entropy", size(gpu), 1e-7, True)
    monkeypatch.setattr(gpu.correctness, "check", lambda _: [right])
    path = tmp_path / "results.json"
    given = ["--length", "64", "--length", "128", "--output", str(path)]
    assert played.main(played.arguments(given)) == 0
    shown = capsys.readouterr().out
    assert shown.count("1 forwards") == 4
    assert "entropy                        right  error 1.0e-07" in shown
    assert len(json.loads(path.read_text())["results"]) == 4
    assert path.with_suffix(".svg").exists()


@pytest.mark.full
def test_behind_a_wrong_answer_the_others_are_timed(
    played: Any, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wrong = gpu.correctness.Checked("x", size(gpu), 0.5, False)
    monkeypatch.setattr(gpu.correctness, "check", lambda _: [wrong])
    path = tmp_path / "results.json"
    given = ["--length", "64", "--output", str(path)]
    assert played.main(played.arguments(given)) == 1
    shown = capsys.readouterr()
    assert "WRONG" in shown.out
    assert shown.err == "Not all answers are right: those that are wrong are not timed.\n"
    rows = json.loads(path.read_text())["results"]
    assert [row.get("left_out") for row in rows] == [None, "its answers are wrong"]


def test_what_was_checked_is_kept_when_the_rest_dies(
    played: Any, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: str) -> Any:
        yield gpu.correctness.Checked("x", size(gpu), 1e-7, True)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.correctness, "check", check)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        played.main(played.arguments(["--output", str(path)]))
    assert [each["asked"] for each in json.loads(path.read_text())["checks"]] == ["x"]


@pytest.mark.full
def test_a_side_that_fails_is_not_a_success(
    played: Any, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> float:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu.correctness, "check", lambda _: [])
    monkeypatch.setattr(played, "timed", taking(gpu, broken))
    given = ["--length", "64", "--output", str(tmp_path / "results.json")]
    assert played.main(played.arguments(given)) == 1


def test_a_peak_that_cannot_be_measured_is_said(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch, "randn", broken)
    assert gpu.__main__.peak_tflops() is None
    assert capsys.readouterr().err == (
        "The peak of the matrix units is not measured: "
        "failed: RuntimeError: an illegal memory access\n"
    )


# Where little more than PyTorch and Triton is installed


def test_the_facts_need_no_installed_regard(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_name(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    class Properties:
        name, multi_processor_count, total_memory = "NVIDIA H200", 132, 140 * 2**30

    pytest.importorskip("triton", reason="the benchmark needs triton: pip install 'regard[gpu]'")
    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    facts = gpu.report.facts()
    assert (facts["gpu"], facts["regard"]) == ("NVIDIA H200", "unknown")
    assert importlib.import_module("benchmarks.machine").description()["regard"] == "unknown"


def documented() -> list[str]:
    """The line of docs/gpu.md that runs the tests, as words."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    (line,) = re.findall(r"^\$ PYTHONPATH=src python (-m pytest .*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_all_tests_that_need_a_gpu_are_in_the_documented_line() -> None:
    # Written apart, so that this file is not one of them.
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "mark." + "gpu" in path.read_text() and path.name != "conftest.py"
    ]
    places = [ROOT / word for word in documented() if word.startswith("tests")]
    assert marked
    assert [path for path in marked if not {path, *path.parents} & set(places)] == []


ABSENT = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
"""


@pytest.mark.full
def test_the_documented_line_needs_nothing_of_pages_notebooks_and_packaging(tmp_path: Path) -> None:
    absent = {"hatchling", "nbclient", "nbformat", "playwright", "polars", "starlette", "uvicorn"}
    (tmp_path / "absent.py").write_text(ABSENT.format(absent=absent))
    line = [sys.executable, "-P", *documented(), "-p", "absent", "--collect-only", "-q"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", str(tmp_path)))}
    done = subprocess.run(
        [*line, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_whoever" not in done.stdout
    assert "test_a_gpu_is_not_waited_for" in done.stdout
