"""The benchmarks run and write what they say; nothing here asserts a time."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

Results = Callable[..., tuple[dict[str, Any], str]]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module behind ``python -m benchmarks``."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.__main__")


@pytest.fixture
def results(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Results:
    """Runs what is asked at tiny size; gives what was written and what was shown."""

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "results.json"
        assert command.main(command.arguments([*arguments, "--quick", "--output", str(path)])) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize("group", ["speed", "memory"])
def test_every_case_runs_and_is_written_and_shown(group: str, results: Results) -> None:
    written, shown = results(group)
    rows = written["results"]
    assert {row["group"] for row in rows} == {group}
    for row in rows:
        assert row["value"] >= 0
        assert row["case"] in shown
    assert f"{len(rows)} of {len(rows)} cases measured" in shown


def test_the_import_is_measured(results: Results) -> None:
    written, _ = results("imports", "--case", "import regard")
    assert [row["unit"] for row in written["results"]] == ["s"]


def test_a_case_is_measured_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "benchmarks.run", "memory", "entropy", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["beside"] == "the matrix 0 MiB"


def test_a_case_has_the_goal_and_the_floor_that_were_agreed(results: Results) -> None:
    written, _ = results("speed", "--case", "randn")
    goals = {row["case"].removesuffix(", randn"): row["goal"] for row in written["results"]}
    assert goals.pop("A @ value") == 1.05
    assert goals.pop("output + six at once") == 3
    assert set(goals.values()) == {1.5}
    assert all(0 <= row["floor"] <= row["goal"] for row in written["results"])


def test_a_tiny_run_neither_reaches_nor_misses_a_goal(results: Results) -> None:
    written, shown = results("memory", "--case", "entropy")
    assert {row["reached"] for row in written["results"]} == {None}
    assert "goals reached" not in shown


def test_a_second_run_keeps_the_rows_it_does_not_replace(results: Results) -> None:
    results("memory", "--case", "topk")
    written, _ = results("memory", "--case", "entropy")
    names = [row["case"] for row in written["results"]]
    assert names == ["entropy", "topk(8)", "gradient of entropy", "gradient of topk(8)"]


def test_rows_of_another_machine_are_dropped(results: Results, tmp_path: Path) -> None:
    results("memory", "--case", "topk")
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"cores": ', '"cores": 9'))
    written, _ = results("memory", "--case", "entropy")
    assert [row["case"] for row in written["results"]] == ["entropy", "gradient of entropy"]


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


def test_the_command_runs_from_the_shell() -> None:
    line = [sys.executable, "-m", "benchmarks", "memory", "--quick", "--case", "gradient of topk"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 of 1 cases measured" in done.stdout


def test_an_unknown_group_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.arguments(["sped"])
    assert "invalid choice: 'sped'" in capsys.readouterr().err


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, *_ = command.CASES

    def fails(quick: bool) -> Any:
        raise OSError("no such meter\nand more")

    cases = [replace(one, name="broken", measure=fails), replace(one, name="whole")]
    monkeypatch.setattr(command, "chosen", lambda group, _: cases if group == one.group else [])
    assert command.main(command.arguments(["--quick"])) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^broken +failed: no such meter$", shown, re.MULTILINE)
    assert re.search(r"^whole +[\d.]+ forwards", shown, re.MULTILINE)
    assert "1 of 2 cases measured" in shown


def committed() -> list[Path]:
    return sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_results_files_have_a_machine_and_rows_with_a_date_and_a_commit() -> None:
    for path in committed():
        written = json.loads(path.read_text())
        assert written["machine"]["torch"]
        for row in written["results"]:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
            assert row["commit"]


@pytest.mark.usefixtures("command")
def test_the_readme_quotes_the_committed_results() -> None:
    figures = importlib.import_module("benchmarks.figures")
    readme = (ROOT / "README.md").read_text()
    assert figures.with_figures(readme, json.loads(figures.RESULTS.read_text())) == readme
