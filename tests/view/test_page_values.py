"""Weights times values and the output, on a page of a recording that has the values."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page
from torch import Tensor

import regard
from pages import Open, limit_of_16_bits, number, recorded, step, table
from regard.recording.layers import InMemory
from regard.view.export.page_file import LIMIT, write_page
from regard.view.tiles.page_answers import Answers
from regard.view.tiles.protocol import OfHead


def with_values(*, dim: int, heads: int = 2) -> regard.Recording:
    """Six heads over two values a layer, as observe(model, keep="qkv") leaves them."""
    recording = recorded(heads=6, kv_heads=2, mask=regard.Causal())
    for place, layer in enumerate(recording.layers):
        value = torch.randn(1, heads, 9, dim, generator=torch.manual_seed(place))
        recording.put(replace(layer, value=InMemory(value)))
    return recording


def output_of(recording: regard.Recording, head: int, query: int) -> Tensor:
    """What A.steps says."""
    value = recording.value(1)
    one = value[0, head * value.shape[1] // 6]
    steps = regard.steps(recording[1][0, head], query=query, value=one)
    assert steps.output is not None
    return steps.output


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("head", [0, 4])
def test_the_steps_that_a_server_tells_have_the_values_and_the_output(
    head: int, heads: int
) -> None:
    recording = with_values(dim=4, heads=heads)
    with Answers(recording) as answers:
        steps = answers.steps(OfHead(1, head), 5, "position", 2, 3)
    assert steps["output"] == pytest.approx(output_of(recording, head, 5).tolist(), abs=1e-5)
    value = recording.value(1)[0, head * heads // 6]
    assert [step["value"] for step in steps["rows"]] == value[2:5].tolist()


def test_without_values_a_server_tells_none() -> None:
    with Answers(recorded()) as answers:
        steps = answers.steps(OfHead(1, 0), 5, "position", 0, 2)
    assert (steps["output"], steps["rows"][0]["value"]) == (None, None)


def opened(page: Page) -> Page:
    page.wait_for_selector("#view-steps table[data-ready]")
    return page


def vectors(page: Page, rows: str, name: str) -> list[list[float]]:
    """The vectors in the column of a name, as they are written."""
    names = page.locator("#view-steps thead th").all_inner_texts()
    cells = page.locator(f"#view-steps {rows} tr > :nth-child({names.index(name) + 1})")
    return [
        [number(text) for text in cell.locator(".vector span").all_inner_texts()]
        for cell in cells.all()
    ]


def test_a_file_without_room_for_the_values_leaves_them_out(tmp_path: Path) -> None:
    recording = with_values(dim=997)
    whole = write_page(recording, tmp_path / "whole.html").read_text()
    tight = write_page(recording, tmp_path / "tight.html", limit=40_000).read_text()
    assert whole.count('"value_dim": 997') + whole.count('"value_dim":997') == 2
    assert '"kind":"query-key"' in tight.replace(" ", "")
    assert '"value_heads":2' not in tight.replace(" ", "")


@pytest.mark.full
@pytest.mark.browser
def test_weights_times_values_and_the_output_are_the_librarys(show: Open, tmp_path: Path) -> None:
    address = "#view=steps&layer=1&head=4&query=5&order=position"
    recording = with_values(dim=4)
    value, weights = recording.value(1)[0, 1], recording[1][0, 4, 5]
    for precision in ("32 bits", "16 bits"):
        with step(precision):
            limit = limit_of_16_bits(recording, tmp_path) if precision == "16 bits" else LIMIT
            path = write_page(recording, tmp_path / "page.html", limit=limit)
            page = opened(show(path, address))
            assert ("in 16 bits" in page.inner_text("#notes")) is (precision == "16 bits")
            near = {"rel": 0.0051, "abs": 1e-6 if precision == "32 bits" else 2e-3}
            shown = torch.tensor(vectors(page, "tbody", "value"))
            assert shown.flatten().tolist() == pytest.approx(value.flatten().tolist(), **near)
            shares = torch.tensor(vectors(page, "tbody", "weight × value"))
            expected = (weights[:, None] * value).flatten().tolist()
            assert shares.flatten().tolist() == pytest.approx(expected, **near)
            output = vectors(page, "tfoot", "weight × value")[0]
            assert output == pytest.approx(output_of(recording, 4, 5).tolist(), **near)
            assert "is not shown" not in page.inner_text("#view-steps .note")
    recording = with_values(dim=7)
    page = opened(show(recording, address))
    with step("longer vectors are pictures and their colours are explained"):
        keys = page.locator('#view-steps tbody canvas[aria-label^="weight × value: 7 "]')
        assert keys.count() == 9
        output_picture = page.locator('#view-steps tfoot canvas[aria-label^="output: 7 numbers"]')
        assert output_picture.count() == 1
        note = page.inner_text("#view-steps .note")
        assert "Values of 7 numbers: blue below 0, orange above" in note
    with step("the numbers of vectors are saved too"):
        head, *rows = table(page, tmp_path)
        first = head.index("vector 0")
        assert head[first:] == [f"vector {d}" for d in range(8)] + [f"value {d}" for d in range(7)]
        *of_keys, query, output = [[float(cell or "nan") for cell in row[first:]] for row in rows]
        dots = [float(row[head.index("query·key")]) for row in rows[:9]]
        products = torch.tensor(of_keys)[:, :8] @ torch.tensor(query[:8])
        assert products.tolist() == pytest.approx(dots, abs=1e-4)
        value = recording.value(1)[0, 1]
        torch.testing.assert_close(torch.tensor(of_keys)[:, 8:], value, atol=1e-5, rtol=1e-5)
        assert output[8:] == pytest.approx(output_of(recording, 4, 5).tolist(), abs=1e-5)
