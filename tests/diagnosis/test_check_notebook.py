"""A notebook checked in a process of its own: all of its attentions, cell by cell."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from checked_files import MODULE, RIGHT, WRONG, trouble
from regard.diagnosis.sandbox.sandbox_process import check_apart

pytestmark = pytest.mark.usefixtures("folder")


def notebook(name: str, *cells: str) -> str:
    code: list[dict[str, Any]] = [
        {"cell_type": "code", "source": textwrap.dedent(cell).strip("\n")} for cell in cells
    ]
    text = {"cell_type": "markdown", "source": ["# Attention"]}
    Path(name).write_text(json.dumps({"nbformat": 4, "cells": [text, *code]}), encoding="utf-8")
    return name


def test_all_attentions_of_a_notebook_are_checked() -> None:
    target = notebook("lesson.ipynb", "%matplotlib inline\nimport torch", RIGHT, "!ls", WRONG)
    reports = check_apart(target).reports
    assert [report["ok"] for report in reports] == [True, False]  # also where both have one name


JUPYTER = {
    "timed": "%%time\nimport torch",
    "assigned": "import torch\nfiles = !ls\nhere = %pwd",
    "await": "import torch, asyncio\nawait asyncio.sleep(0)",
    "magic in Python": "get_ipython().run_line_magic('matplotlib', 'inline')\nimport torch",
    "shell": "%%bash\nls",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "cells", [[*JUPYTER.values()], *([cell] for cell in JUPYTER.values())], ids=["all", *JUPYTER]
)
def test_what_only_jupyter_understands_stops_no_cell(cells: list[str]) -> None:
    checked = check_apart(notebook("lesson.ipynb", *cells, "import torch", RIGHT))
    assert (checked.troubles, [report["ok"] for report in checked.reports]) == ((), [True])


@pytest.mark.full
def test_a_finding_in_a_notebook_is_in_its_cell() -> None:
    reports = check_apart(notebook("lesson.ipynb", "import torch", WRONG)).reports
    finding = reports[0]["findings"][0]
    assert (finding["file"], finding["line"]) == ("lesson.ipynb, cell 2", 4)


@pytest.mark.full
def test_a_cell_that_raises_does_not_stop_the_others() -> None:
    checked = check_apart(notebook("lesson.ipynb", "Linear1 = nn.Linear()", RIGHT))
    assert [report["ok"] for report in checked.reports] == [True]
    assert checked.troubles == (
        "lesson.ipynb, cell 1 raises NameError on line 1: name 'nn' is not defined; it must run "
        "before it can be checked.\n    1 | Linear1 = nn.Linear()",
    )


@pytest.mark.full
@pytest.mark.parametrize("broken_first", [True, False], ids=["before-it", "after-it"])
def test_a_cell_that_does_not_compile_hides_no_class(broken_first: bool) -> None:
    cells = ["x = = 3", MODULE + "\nlayer = SelfAttention(16, 4)"]
    checked = check_apart(notebook("lesson.ipynb", *(cells if broken_first else cells[::-1])))
    assert [report["name"] for report in checked.reports] == ["SelfAttention"]
    assert checked.troubles == (
        f"lesson.ipynb, cell {1 if broken_first else 2} does not compile, line 1: invalid syntax; "
        "it must be Python.\n    1 | x = = 3",
    )


@pytest.mark.full
def test_a_cell_with_a_null_byte_hides_no_class() -> None:
    checked = check_apart(notebook("lesson.ipynb", "x = 1\ny = '\0'", RIGHT))
    assert [report["name"] for report in checked.reports] == ["attention"]
    assert checked.troubles == (
        "lesson.ipynb, cell 1 does not compile, line 2: there is a null byte; it must be Python."
        "\n    2 | y = '\0'",
    )


@pytest.mark.full
def test_a_notebook_whose_class_forgets_a_name() -> None:
    """As the first of the five does: ``h`` is never defined."""
    target = notebook(
        "lesson.ipynb",
        "import torch\nimport torch.nn as nn",
        """
        class SelfAttention(nn.Module):
            def __init__(self, k, heads):
                super().__init__()
                self.to_queries = nn.Linear(k, k * heads, bias=False)

            def forward(self, x):
                b, t, k = x.size()
                queries = self.to_queries(x).view(b, t, h, k)
        """,
        "self_attention = SelfAttention(k=2, heads=5)",
    )
    assert check_apart(target).troubles == (
        "lesson.ipynb, cell 2 raises NameError on line 8: name 'h' is not defined; it must run "
        "before it can be checked.\n"
        "    8 | queries = self.to_queries(x).view(b, t, h, k)",
    )


ENCODER_STATES = """
import torch
import torch.nn.functional as F
encoder_hidden_states = torch.tensor([[0.21, 0.51, 1.25], [4.13, -41.3, 0.31], [3.2, 0.02, 9.44]])
softmax_scores = F.softmax(torch.tensor([13.0, 9.0, 9.0]), dim=0)
"""
PROJECTED = """
import torch
v = torch.tensor([[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
keys = v @ torch.tensor([[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
queries = v @ torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "cells",
    [
        (ENCODER_STATES, "(softmax_scores * encoder_hidden_states).sum(dim=-1)"),
        (ENCODER_STATES, "softmax_scores @ encoder_hidden_states"),
        (PROJECTED, "scores = queries @ keys.T", "torch.softmax(scores / 3**0.5, dim=-1)"),
    ],
    ids=["weighs columns", "weighs rows", "whole numbers"],
)
def test_cells_whose_scores_follow_from_no_tokens_are_no_verdict(cells: tuple[str, ...]) -> None:
    (report,) = check_apart(notebook("lesson.ipynb", *cells)).reports
    assert (report["verdict"], report["findings"]) == ("cannot tell", [])
    assert report["missing"].endswith("Make it a function, def attention(x): ..., and check that.")


@pytest.mark.full
def test_a_notebook_without_attention() -> None:
    assert trouble(notebook("lesson.ipynb", "x = 1")) == (
        "lesson.ipynb holds no attention; check looks at classes, functions and cells with a "
        "softmax.\n    Define one, or make one: layer = SelfAttention(16, 4)"
    )


@pytest.mark.full
def test_a_cell_without_end_hides_nothing_that_others_define() -> None:
    target = notebook("lesson.ipynb", "import time\ntime.sleep(600)", RIGHT)
    checked = check_apart(target, seconds=48.0)
    assert [report["verdict"] for report in checked.reports] == ["right"]
    [trouble] = checked.troubles
    assert trouble.startswith("lesson.ipynb is still running after ")
    assert trouble.partition(", in ")[2] == (
        "cell 1, line 2; it must come to an end.\n"
        "    What trains or waits belongs elsewhere, or give it more: --timeout 600"
    )


@pytest.mark.full
def test_a_cell_that_catches_everything_and_never_ends() -> None:
    waiting = (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n"
    )
    target = notebook("lesson.ipynb", "x = 1", f"{waiting}        pass")
    assert trouble(target, 1.0).startswith(
        "lesson.ipynb is still running after 1 s, in cell 2, line "
    )
