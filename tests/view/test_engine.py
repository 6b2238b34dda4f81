"""The page's engine, asked without a browser: its numbers are those of the library."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from cases import in_turn
from pages import answers_of, first_layer, limit_of_16_bits, recorded
from regard.view.export.page_file import write_page

MATRICES = {
    "plain": {},
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "causal": {"mask": regard.Causal()},
    "causal, grouped heads": {"heads": 4, "kv_heads": 1, "mask": regard.Causal()},
    "window": {"mask": regard.SlidingWindow(2, 1)},
    "padding": {"mask": regard.Padding([6])},
    "a mask with gaps": {"mask": torch.arange(81).reshape(9, 9) % 3 != 1},
    "bias": {"bias": torch.linspace(-2, 2, 81).reshape(9, 9)},
    "cross-attention": {"tokens": 5, "keys": 13},
    "scale": {"scale": 0.1},
}
CASES = pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in MATRICES.items()])


def asked(
    recording: regard.Recording, questions: list[dict[str, Any]], folder: Path
) -> list[dict[str, Any]]:
    return answers_of(write_page(recording, folder / "page.html"), questions)


@pytest.mark.sampled(4)
@CASES
def test_rows_and_columns_are_those_of_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    recording = recorded(**options)
    weights = recording[0][0, 1].to_dense()
    queries, keys = weights.shape
    questions = [{"kind": "row", "head": 1, "query": query} for query in range(queries)]
    questions += [{"kind": "column", "head": 1, "key": key} for key in range(keys)]
    found = asked(recording, questions, tmp_path)
    rows = torch.tensor([answer["values"] for answer in found[:queries]])
    columns = torch.tensor([answer["values"] for answer in found[queries:]])
    torch.testing.assert_close(rows, weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(columns.T, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.full
def test_rows_of_fewer_bits_are_as_close_as_the_page_says(tmp_path: Path) -> None:
    query, key = torch.randn(2, 1, 2, 9, 64, generator=torch.Generator().manual_seed(0))
    recording = regard.Recording({"layer": regard.attend(query, key)})
    limit = limit_of_16_bits(recording, tmp_path)
    page = write_page(recording, tmp_path / "page.html", limit=limit)
    layer, _ = first_layer(page)
    assert layer["dtype"] == "float16"
    found = answers_of(page, [{"kind": "row", "head": 1, "query": query} for query in range(9)])
    rows = torch.tensor([answer["values"] for answer in found])
    off = float((rows - recording[0][0, 1].to_dense()).abs().max())
    assert 0 < off <= layer["deviation"] + 1e-6
    assert off < 3e-3


@pytest.mark.sampled(4)
@CASES
def test_steps_are_those_of_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    recording = recorded(**options)
    count = recording[0].shape[-1]
    question = {"kind": "steps", "head": 1, "query": 3, "by": "position", "start": 0}
    (found,) = asked(recording, [question | {"count": count}], tmp_path)
    table = regard.steps(recording[0][0, 1], query=3).table
    assert [step["key"] for step in found["rows"]] == list(range(count))
    # A mask with gaps and a bias leave the file with the weights alone.
    names = {"weight": "weight"}
    if found["vector"] is not None:
        names |= {"query·key": "dot", "scaled" if "scaled" in table.names else "score": "scaled"}
    for name, part in names.items():
        expected = [float(cell) for cell in table[name][:count]]
        assert [step[part] for step in found["rows"]] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@in_turn(mask=["all keys", "causal"], hidden=[False, True])
def test_segments_are_those_of_the_library(mask: str, hidden: bool, tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal() if mask == "causal" else None)
    spans = {"one": (1, 4), "two": (4, 6), "three": (6, 9)}
    parts = list(spans.values())
    question = {"kind": "segments", "head": 1, "hidden": hidden, "queries": parts, "keys": parts}
    (found,) = asked(recording, [question], tmp_path)
    expected = regard.segment_shares(recording, spans, sinks=not hidden).weights[0, 1]
    assert found["values"] == pytest.approx(expected.flatten().tolist(), rel=1e-4, abs=1e-6)
