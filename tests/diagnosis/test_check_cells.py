"""What a notebook's bare cells compute, judged by the laws of attention."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cases import full_but
from regard.diagnosis.inputs.notebook_cells import namespace, read_cells, run_cell
from regard.diagnosis.notebook_function import report_of_cells
from regard.diagnosis.report import Report

START = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x = torch.randn(6, 8)
q, k, v = x @ torch.randn(8, 4), x @ torch.randn(8, 4), x @ torch.randn(8, 4)
tril = torch.tril(torch.ones(6, 6))
s = q @ k.T / 2
"""
BATCH = """
X = torch.randn(2, 5, 8)
Q, K, V = (nn.Linear(8, 8)(X).view(2, 5, 2, 4).transpose(1, 2) for _ in range(3))
"""


def judged(folder: Path, *cells: str) -> Report | None:
    """The report on cells behind those that make x, q, k, v and s."""
    path = folder / "lesson.ipynb"
    sources = [{"cell_type": "code", "source": cell.strip("\n")} for cell in (START, *cells)]
    path.write_text(json.dumps({"nbformat": 4, "cells": sources}), encoding="utf-8")
    read = read_cells(path)
    module = namespace("lesson_of_cells", read)
    for cell in read:
        run_cell(cell, module)
    return report_of_cells(path.name, read, module)


def told(report: Report | None) -> tuple[str, list[tuple[str, int | None]]]:
    assert report is not None
    return report.verdict, [(finding.name, finding.line) for finding in report.findings]


WRONG: dict[str, tuple[str, list[tuple[str, int]]]] = {
    "over queries": ("w = F.softmax(s, dim=0)\nout = w @ v", [("softmax-wrong-axis", 1)]),
    "no scale": ("w = F.softmax(q @ k.T, -1)\nout = w @ v", [("no-scale", 1)]),
    "both": (
        "raw = q @ k.T\nout = F.softmax(raw, dim=0) @ v",
        [("softmax-wrong-axis", 2), ("no-scale", 1)],
    ),
    "by embed_dim": (
        "w = F.softmax(q @ k.T / 8**0.5, -1)\nout = w @ v",
        [("scale-by-embed-dim", 1)],
    ),
    "multiplied": ("w = F.softmax(q @ k.T * 2, -1)\nout = w @ v", [("wrong-scale", 1)]),
    "scaled behind it": ("w = F.softmax(q @ k.T, -1)\nw = w / 2\nw @ v", [("wrong-scale", 2)]),
    "weights transposed": (
        "w = F.softmax(s, -1)\nout = w.T @ v",
        [("values-mixed-along-wrong-axis", 2)],
    ),
    "masked after it": (
        "w = F.softmax(s, -1)\nw = w * tril\nout = w @ v",
        [("mask-after-softmax", 2)],
    ),
    "sees the next": (
        "m = torch.triu(torch.ones(6, 6), 2) == 1\nF.softmax(s.masked_fill(m, -1e9), -1) @ v",
        [("causal-off-by-one", 1)],
    ),
    "sees not itself": (
        "s[tril.T == 1] = -torch.inf\nw = F.softmax(s, -1)\nout = w @ v",
        [("nan-rows", 2), ("causal-off-by-one", 1)],
    ),
    "mask inverted": (
        "w = F.softmax(s.masked_fill(tril == 1, -torch.inf), -1)\nout = w @ v",
        [("mask-inverted", 1)],
    ),
    "mask added": ("w = F.softmax(s + tril, -1)\nout = w @ v", [("mask-added-as-numbers", 1)]),
    "by hand": (
        "e = torch.exp(s)\nw = e / e.sum(0, keepdim=True)\nout = w @ v",
        [("softmax-wrong-axis", 2)],
    ),
    "heads": (f"{BATCH}\nw = F.softmax(Q @ K.mT, -1)\nout = w @ V", [("no-scale", 4)]),
    "heads merged by a reshape": (
        f"{BATCH}\nout = F.softmax(Q @ K.mT / 2, -1) @ V\nout.reshape(2, 5, 8)",
        [("heads-merged-without-transpose", 5)],
    ),
    "heads split by a view": (
        "X = torch.randn(2, 5, 8)\n"
        "Q, K, V = (nn.Linear(8, 8)(X).view(2, 2, 5, 4) for _ in range(3))\n"
        "F.softmax(Q @ K.mT / 2, -1) @ V",
        [("heads-split-without-transpose", 2)],
    ),
    "heads of a token": (
        "X = torch.randn(2, 5, 8)\n"
        "Q, K, V = (nn.Linear(8, 8)(X).view(2, 5, 2, 4) for _ in range(3))\n"
        "F.softmax(Q @ K.mT / 2, -1) @ V",
        [("heads-and-tokens-exchanged", 3)],
    ),
    "first right, then transposed": (
        "w = F.softmax(s, -1)\nout = w @ v\nout = w.T @ v",
        [("values-mixed-along-wrong-axis", 3)],
    ),
    "over heads": (f"{BATCH}\nF.softmax(Q @ K.mT / 2, 1) @ V", [("softmax-wrong-axis", 4)]),
}
RIGHT = {
    "plain": "w = F.softmax(s, -1)\nout = w @ v",
    "causal": "w = F.softmax(s.masked_fill(tril == 0, -torch.inf), -1)\nout = w @ v",
    "causal by index": "s[tril == 0] = -1e9\nout = F.softmax(s, -1) @ v",
    "causal, divided again": "w = F.softmax(s, -1) * tril\nw = w / w.sum(-1, keepdim=True)\nw @ v",
    "queries scaled": "q = q / 2\nF.softmax(q @ k.T, -1) @ v",
    "keys first": "w = F.softmax(k @ q.T / 2, 0)\nout = w.T @ v",
    "values as columns": "w = F.softmax(s, -1)\nout = v.T @ w.T",
    "einsum": "w = torch.einsum('id,jd->ji', q, k).div(2).softmax(-2)\n"
    "torch.einsum('ji,jd->id', w, v)",
    "by hand": "e = torch.exp(s - s.max(-1, keepdim=True).values)\n"
    "(e / e.sum(-1, keepdim=True)) @ v",
    "one kernel": "F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)",
    "tokens of a table": "ids = torch.tensor([3, 1, 4, 1, 5, 2])\n"
    "e = nn.Embedding(9, 8)(ids).detach()\nF.softmax(e @ e.T / 8**0.5, -1) @ e",
    "rolled out": "w = F.softmax(s, -1)\nout = w @ v\nboth = w @ w",
}
NEVER_RIGHT = {
    "filled with 0": "w = F.softmax(s.tril(), -1)\nout = w @ v",
    "values first": "v = x @ torch.randn(8, 6)\nw = F.softmax(s, -1)\nout = v @ w",
    "a softmax alone": "x.softmax(0)",
    "a classifier": "nn.Linear(8, 3, bias=False)(x).softmax(-1)",
    "no scale, and no values": "F.softmax(q @ k.T, -1)",
    "dropout": "F.dropout(F.softmax(s, -1), 0.5) @ v",
    "times the keys": "w = F.softmax(s, -1)\nout = w @ k",
    "one query without a scale": "w = F.softmax(k @ q[1], 0)\nout = w @ v",
    "given scores": "w = F.softmax(torch.randn(6, 6), 0)\nw @ x",
    "values unused": "a, b = torch.randn(6, 4), torch.randn(6, 4)\nF.softmax(a @ b.T / 2, -1) @ b",
}


@pytest.mark.parametrize("case", full_but(WRONG, "heads merged by a reshape", "both"))
def test_a_mistake_of_the_cells_is_named_with_its_line(
    tmp_path: Path, case: tuple[str, Sequence[tuple[str, int]]]
) -> None:
    cell, findings = case
    report = judged(tmp_path, cell)
    verdict, named = told(report)
    assert (verdict in ("wrong", "different"), named) == (True, findings), report
    assert report is not None
    for finding in report.findings:
        assert finding.file == "lesson.ipynb, cell 2"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cell", RIGHT.values(), ids=RIGHT)
def test_cells_that_compute_attention_are_right(tmp_path: Path, cell: str) -> None:
    assert told(judged(tmp_path, cell)) == ("right", [])


@pytest.mark.parametrize("cell", NEVER_RIGHT.values(), ids=NEVER_RIGHT)
def test_cells_that_show_no_attention_are_not_called_right(tmp_path: Path, cell: str) -> None:
    report = judged(tmp_path, cell)
    assert report is not None
    assert report.verdict != "right"


def test_cells_without_a_softmax_have_no_report(tmp_path: Path) -> None:
    assert judged(tmp_path, "q @ k.T") is None


def test_the_matrices_are_those_of_the_cells(tmp_path: Path) -> None:
    report = judged(tmp_path, "w = F.softmax(s, dim=0)\nout = w @ v")
    assert report is not None
    [finding] = report.findings
    assert finding.did is not None
    assert finding.attention is not None
    assert finding.did.shape == finding.attention.shape == (4, 4)
    assert finding.caption == "weights of tokens 1 to 4 (down) for tokens 1 to 4 of 6"
