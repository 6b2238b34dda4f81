"""regard monitor, as people type it."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from commands import Run


@pytest.fixture
def training(working_folder: Path) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(regard.nn.SelfAttention(8, 2), regard.nn.SelfAttention(8, 2))
    with regard.Monitor(model, working_folder / "run", every=5) as monitor:
        for step in range(11):
            with monitor(step):
                model(torch.zeros(1, 20, 8))
    return "run"


def test_the_last_step_is_shown_for_each_layer(run: Run, training: str) -> None:
    code, out, err = run("monitor", training)
    assert (code, err) == (0, "")
    step, head, *layers = [line.split() for line in out.splitlines()]
    assert " ".join(step) == "step 10, all rows"
    assert head == [
        *("layer", "name", "max_score", "normalized_entropy", "dead_heads", "first_token"),
        *("previous_token", "local_window"),
    ]
    assert [line[:2] for line in layers] == [["0", "0"], ["1", "1"]]
    assert [(line[3], line[4], line[5]) for line in layers] == 2 * [("1.0000", "2", "0.0500")]


def test_what_the_run_has_is_shown_with_its_rows(run: Run, working_folder: Path) -> None:
    model = regard.nn.SelfAttention(8, 2)
    options = {"statistics": ["entropy"], "rows": 3}
    with regard.Monitor(model, working_folder / "run", **options) as monitor, monitor(0):
        model(torch.zeros(1, 20, 8))
    _, out, _ = run("monitor", "run")
    assert out.startswith("step 0, the last 3 rows of each sequence\n")
    assert out.splitlines()[1].split() == ["layer", "name", "entropy"]


def test_heads_with_nan_are_not_called_alive(run: Run, working_folder: Path) -> None:
    model = regard.nn.SelfAttention(8, 2)
    with regard.Monitor(model, working_folder / "run") as monitor, monitor(0):
        model(torch.full((1, 20, 8), torch.nan))
    _, out, _ = run("monitor", "run", "--json")
    assert json.loads(out)["rows"]
    _, head, layer = run("monitor", "run")[1].splitlines()
    assert layer.split()[head.split().index("dead_heads")] not in ("0", "1", "2")


def test_json_has_the_rows_of_the_last_step_and_csv_those_of_all(run: Run, training: str) -> None:
    code, out, _ = run("monitor", training, "--json")
    rows = json.loads(out)["rows"]
    assert (code, len(rows)) == (0, 2 * 2 * 10)
    assert {row["step"] for row in rows} == {10}
    table = list(csv.DictReader(run("monitor", training, "--csv")[1].splitlines()))
    assert len(table) == 3 * len(rows)
    assert [row["step"] for row in table[:: len(rows)]] == ["0", "5", "10"]
    assert list(table[0]) == list(rows[0])


@pytest.mark.full
def test_the_page_has_every_statistic_and_asks_nothing(run: Run, training: str) -> None:
    code, out, _ = run("monitor", training, "--output", "training.html")
    assert code == 0
    assert out.splitlines()[-1].startswith("training.html   ")
    page = Path("training.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 10
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    assert "<script" not in page


def test_mistakes_end_in_one_sentence(run: Run, working_folder: Path) -> None:
    assert run("monitor", "nothing") == (
        2,
        "",
        "regard: there is no folder nothing.\n    Pass the path of regard.Monitor(model, path).\n",
    )
