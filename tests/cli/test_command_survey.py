"""regard survey, as people type it."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from commands import Run


@pytest.fixture
def corpus(working_folder: Path) -> str:
    lines = (f"line {number} of a short text\n" for number in range(1500))
    (working_folder / "corpus.txt").write_text("".join(lines))
    return "corpus.txt"


def test_a_survey_says_where_its_rows_are(run: Run, bert: str, working_folder: Path) -> None:
    (working_folder / "two.txt").write_text("eat first\nlife is short\n")
    code, out, _ = run("survey", "two.txt", "-o", "out", "-m", bert, "--part", "eat=eat")
    rows = ds.dataset("out/part-00000000.parquet").to_table()
    assert (code, out) == (0, f"out   {len(rows)} rows in 1 Parquet file\n")
    assert rows["text"].unique().to_pylist() == [0, 1]
    assert None in rows["eat"].to_pylist()
    assert json.loads(
        run("survey", "two.txt", "-o", "out", "-m", bert, "--part", "eat=eat", "--json")[1]
    ) == {
        "path": "out",
        "files": 1,
        "rows": len(rows),
    }


def test_mistakes_end_in_one_sentence(run: Run, bert: str, working_folder: Path) -> None:
    (working_folder / "bad.txt").write_text("eat\nfirst\n")
    (working_folder / "bad.jsonl").write_text('{"text": 1}\n')
    assert run("survey", "bad.jsonl", "-o", "out", "-m", bert) == (
        2,
        "",
        "regard: bad.jsonl, line 1: 'text' is missing or no string; each text must be a string.\n"
        "    Correct it, or name another column.\n",
    )
    code, _, err = run("survey", "bad.txt", "-o", "out", "-m", bert, "--part", "x")
    assert (code, err.splitlines()[0]) == (2, "regard: part is 'x'; it must be NAME=PATTERN.")


@pytest.mark.filterwarnings("default::UserWarning")
def test_blank_lines_are_counted_and_the_folder_has_a_default(
    run: Run, bert: str, working_folder: Path
) -> None:
    (working_folder / "gaps.txt").write_text("eat first\n\n  \nlife is short\n")
    code, out, err = run("survey", "gaps.txt", "-m", bert)
    assert (code, err) == (0, "regard: 2 blank texts of gaps.txt skipped.\n")
    assert out.startswith("survey   ")
    assert ds.dataset("survey").to_table()["text"].unique().to_pylist() == [0, 1]


@pytest.mark.full
def test_processes_of_torchrun_share_a_survey(corpus: str, bert: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "regard", "survey", corpus, "-o", "out", "--model", bert]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    names = [path.name for path in sorted(Path("out").iterdir())]
    assert names == ["part-00000000.parquet", "part-00000001.parquet"]
    texts = ds.dataset("out").to_table()["text"].unique().to_pylist()
    assert sorted(texts) == list(range(1500))
