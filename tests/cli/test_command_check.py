"""The command regard check: what is wrong with a file or a notebook, and its exit code."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.cli import app as cli
from regard.cli.check_command import named_options

RIGHT = """
def attention(q, k, v):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
"""
WRONG = RIGHT.replace("softmax(-1)", "softmax(-2)")
CLASS = """
from torch import nn

class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.inner = nn.MultiheadAttention(embed_dim, num_heads, dropout, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``regard check`` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run_check(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["check", *arguments])
        return int(end.value.code or 0), *capfd.readouterr()

    return run_check


def test_a_mistake_is_named_with_its_line_and_exit_code_1(run: Run) -> None:
    Path("mine.py").write_text(WRONG)
    code, out, err = run("mine.py:attention")
    assert (code, err) == (1, "")
    assert "softmax-wrong-axis" in out
    assert "mine.py, line 3:" in out


@pytest.mark.full
def test_what_is_right_has_exit_code_0(run: Run) -> None:
    Path("mine.py").write_text(RIGHT)
    code, out, _ = run("mine.py")
    assert code == 0
    assert "attention is right; " in out
    assert out.splitlines()[-1].startswith("To pin it:  regard.check(attention, expect=")


@pytest.mark.full
@pytest.mark.parametrize(
    ("expected", "code", "said"),
    [
        ('{"causal": false}', 0, "attention is right; "),
        ('{"causal": true}', 1, "attention is wrong: not-causal."),
    ],
)
def test_what_is_expected_is_a_line_of_json(run: Run, expected: str, code: int, said: str) -> None:
    Path("mine.py").write_text(RIGHT)
    told, out, err = run("mine.py:attention", "--expect", expected)
    assert (told, err) == (code, "")
    assert said in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ("causal", "--expect 'causal' is no JSON"),
        ('{"causality": true}', "--expect names causality; it knows bias, causal, documents,"),
        ('{"causal": false, "window": 4}', "causal=False and window=4 contradict each other"),
    ],
)
def test_what_is_no_spec_is_refused_before_anything_runs(
    run: Run, expected: str, said: str
) -> None:
    code, out, err = run("missing.py:attention", "--expect", expected)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.full
def test_json_is_all_of_standard_output(run: Run) -> None:
    Path("mine.py").write_text(WRONG)
    code, out, _ = run("mine.py:attention", "--json")
    told = json.loads(out)
    assert told["exit_code"] == code == 1
    assert told["reports"][0]["findings"][0]["name"] == "softmax-wrong-axis"


@pytest.mark.full
def test_other_options_go_to_the_class(run: Run) -> None:
    Path("mine.py").write_text(CLASS)
    code, out, _ = run("mine.py:Attention", "--embed-dim", "16", "--num-heads=4")
    assert code == 0
    assert "4 heads" in out


@pytest.mark.full
def test_a_class_without_its_arguments_says_how_to_give_them(run: Run) -> None:
    Path("mine.py").write_text(CLASS.replace("num_heads", "parts"))
    code, out, err = run("mine.py:Attention")
    assert (code, out) == (2, "")
    assert err.startswith("regard: Attention has no value for embed_dim, parts;")


@pytest.mark.full
def test_a_number_that_was_left_out_is_asked_for(run: Run) -> None:
    Path("mine.py").write_text(CLASS)
    code, out, err = run("mine.py:Attention", "--embed-dim", "--num-heads", "4")
    assert (code, out) == (2, "")
    assert err == (
        "regard: --embed-dim has no value; Attention takes one there.\n"
        "    Write for example: --embed-dim 32\n"
    )


@pytest.mark.full
def test_arguments_that_no_name_tells_are_one_clear_error(run: Run) -> None:
    Path("mine.py").write_text("def attention(a, b, c, d, e, f):\n    return a.softmax(-1)\n")
    code, out, err = run("mine.py:attention")
    assert (code, out) == (2, "")
    assert err == (
        "regard: attention needs b, c, d, e, f; check knows embeddings, query, key, value, scores, "
        "masks and lengths by their names.\n"
        "    Pass an example call: regard.check(attention, args=(torch.randn(2, 7, 24),), "
        "kwargs={'b': ..., 'c': ..., 'd': ..., 'e': ..., 'f': ...}).\n"
        "    In a shell: --example example.py:call, where call() returns those args and kwargs.\n"
    )


@pytest.mark.full
def test_the_cells_of_a_notebook_are_run_after_saying_so(run: Run) -> None:
    cell = {"cell_type": "code", "source": WRONG, "metadata": {}, "outputs": []}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    Path("mine.ipynb").write_text(json.dumps(notebook))
    code, out, err = run("mine.ipynb")
    assert code == 1
    assert err == "runs the cells of mine.ipynb in a process of their own, 60 s at most\n"
    assert "softmax-wrong-axis" in out


def test_a_file_that_is_not_there_is_one_clear_error(run: Run) -> None:
    code, out, err = run("nope.py")
    assert (code, out) == (2, "")
    assert err.startswith("regard: nope.py does not exist;")


@pytest.mark.full
def test_code_that_never_ends_is_ended(run: Run) -> None:
    Path("mine.py").write_text("while True:\n    pass\n")
    code, _, err = run("mine.py", "--timeout", "1")
    assert code == 3
    assert err.startswith("regard: mine.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["16"], "argument '16' has no option name before it", id="no name"),
        pytest.param(
            ["--n", "1", "2"], "argument '2' has no option name before it", id="two values"
        ),
        pytest.param(["--n", "1", "--n=2"], "option --n is given twice", id="twice"),
    ],
)
def test_options_that_are_wrong_are_one_clear_error(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        named_options(words)


def test_options_are_read_as_json_or_python_reads_them_else_as_text() -> None:
    words = ["--embed-dim", "16", "--scale=0.5", "--causal", "--kind", "full", "--bias", "false"]
    words += ["--norm", "None", "--gated", "False"]
    expected = {"embed_dim": 16, "scale": 0.5, "causal": True, "kind": "full", "bias": False}
    expected |= {"norm": None, "gated": False}
    assert named_options(words) == expected


def test_a_law_is_explained(run: Run) -> None:
    code, out, _ = run("--explain", "pure")
    assert code == 0
    assert out.startswith("pure (law)\n  In eval mode the same call gives the same output")


@pytest.mark.full
def test_an_example_file_gives_the_arguments(run: Run) -> None:
    Path("mine.py").write_text(
        "def attention(q, k, v, days):\n"
        "    scores = q @ k.mT / q.shape[-1] ** 0.5 - (days[:, None] - days).abs()\n"
        "    return scores.softmax(-1) @ v\n"
    )
    Path("example.py").write_text(
        "import torch\ndef call():\n    return (*torch.randn(3, 2, 7, 8), torch.arange(7.0))\n"
    )
    code, out, err = run("mine.py:attention", "--example", "example.py:call")
    assert (code, err) == (0, ""), out
    assert "ALiBi of slopes 1 " in out
    assert "attention is right; 5 laws of attention hold" in out
