"""The page's steps: every number is that of A.steps, and tells the sum that made it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page

import regard
from pages import Open, address, go, number, recorded, sentence, three_digits
from regard.view.export import page_file as file
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]

# Three digits are shown: half of the last one is at most 0.5 % of the number.
SHOWN = 0.0051


def opened(page: Page) -> Page:
    page.wait_for_selector("#view-steps table[data-ready]")
    return page


def column(page: Page, name: str) -> list[str]:
    """The column of a name, the key rows only."""
    names = page.locator("#view-steps thead th").all_inner_texts()
    place = next(i for i, text in enumerate(names) if text.startswith(name))
    cells = page.locator(f"#view-steps tbody tr > :nth-child({place + 1})").all_inner_texts()
    return [cell.strip() for cell in cells]


def keys(page: Page) -> list[int]:
    return [int(text) for text in page.locator("#view-steps tbody th .position").all_inner_texts()]


def test_every_number_is_that_of_the_library(show: Open) -> None:
    recording = recorded(heads=6, kv_heads=2, mask=regard.Causal())
    page = opened(show(recording, "#view=steps&layer=1&head=1&query=3&order=position"))
    table = regard.steps(recording[1][0, 1], query=3).table
    count = recording[1].shape[-1]
    assert keys(page) == list(range(count))
    scaled = "scaled" if "scaled" in table.names else "score"  # without a mask they are the same
    for name, shown in [("query·key", "query·key"), (scaled, "× "), ("weight", "weight")]:
        expected = [float(cell) for cell in table[name][:count]]
        assert [number(text) for text in column(page, shown)] == pytest.approx(
            expected, rel=SHOWN, abs=1e-12
        )
    scores = torch.tensor([float(cell) for cell in table["score"][:count]])
    assert [number(text) for text in column(page, "exp")] == pytest.approx(
        scores.exp().tolist(), rel=SHOWN
    )
    if "mask" in table.names:
        assert column(page, "mask") == ["yes" if may else "no" for may in table["mask"][:count]]


def test_numbers_of_a_page_in_half_precision_are_those_of_the_vectors(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "FULL_PRECISION", 0)
    monkeypatch.setattr(file, "NEARLY_FULL_PRECISION", 0)
    large = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(1)) * 40
    recording = regard.Recording({"layer": regard.attend(large, large / 900)})
    page = opened(show(write_page(recording, tmp_path / "half.html"), "#view=steps&query=2"))
    dots = (large[0, 0, 2] @ large[0, 0].T / 900).tolist()
    # Half precision keeps 11 bits.
    assert [number(text) for text in column(page, "query·key")] == pytest.approx(
        dots, rel=0.01, abs=0.05
    )
    assert "in 16 bits" in page.inner_text("#notes")


# What the notebooks print


def notebook(**options: Any) -> regard.Recording:
    query = torch.tensor([[1.0, 0.0, 2.0], [2.0, 2.0, 2.0], [2.0, 1.0, 3.0]])
    key = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, -1.0]])
    matrix = regard.attend(query, key, **options)
    return regard.Recording({"layer": matrix}, query_tokens=["Life", " is", " short"])


def test_a_number_tells_the_sum_that_made_it_and_the_last_row_adds_up(show: Open) -> None:
    page = opened(show(notebook(mask=regard.Causal()), "#view=steps&query=1"))
    page.hover('#view-steps [data-row="0"] [data-column="5"]')
    assert page.inner_text("#view-steps .sum").replace("\u202f", " ") == (
        "“Life”: weight = 10.1 / 10,286, the sum over all keys = 0.0979 %"
    )
    page = opened(show(notebook(), "#view=steps&query=1"))
    scores = torch.tensor([4.0, 16.0, 8.0]) / 3**0.5
    total = f"{float(scores.exp().sum()):,.0f}"
    assert page.locator("#view-steps tfoot td").all_inner_texts()[-2:] == [total, "100\u202f%"]
    page.hover('#view-steps tfoot [data-column="3"]')
    assert page.inner_text("#view-steps .sum") == (
        f"The sum of exp(score) over all 3 keys = {total}"
    )


# Many keys, and ways to move


def test_the_strongest_come_first_and_more_on_demand_as_the_address_says(show: Open) -> None:
    recording = recorded(tokens=100)
    page = opened(show(recording, "#view=steps&query=50"))
    strongest = recording[0][0, 0, 50].argsort(descending=True, stable=True).tolist()
    assert keys(page) == strongest[:32]
    assert page.inner_text("#view-steps .scroller > button") == "32 more of 68"
    page.click("#view-steps .scroller > button")
    page.wait_for_selector('#view-steps table[data-ready$=",64"]')
    assert keys(page) == strongest[:64]
    assert address(page, lambda said: "steps" in said)["steps"] == "64"
    page.reload()
    page.wait_for_selector("#view-steps tbody [data-row='63']")
    go(page, 0, 0, 51, 3, view="steps")
    page.wait_for_selector("#view-steps tbody:not(:has([data-row='32']))")


def test_the_order_by_position_is_remembered_in_the_address(show: Open) -> None:
    page = opened(show(recorded(tokens=100), "#view=steps&query=50&key=3"))
    page.click("text=By position")
    assert address(page, lambda said: said.get("order") == "position")["order"] == "position"
    page.wait_for_selector('#view-steps table[data-ready*="position"]')
    assert keys(page) == list(range(32))


def test_the_arrows_go_on_and_a_click_keeps_the_key(
    show: Open,
) -> None:
    page = opened(show(notebook(), "#view=steps&query=1&key=0"))
    page.focus('#view-steps [data-column][tabindex="0"]')
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#view-steps .sum") == "“is”: scaled = 16 × 1/√3 = 9.24"
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#view-steps .sum") == "“Life”: scaled = 4 × 1/√3 = 2.31"
    assert address(page, lambda said: said.get("query") == "1")["query"] == "1"
    page = opened(show(notebook(), "#view=steps&query=0&key=0"))
    page.keyboard.press("ArrowDown")  # outside the table
    page.wait_for_selector('#view-steps h2:text("How “is”")')
    page.click('#view-steps [data-row="2"] [data-column="0"]')
    assert address(page, lambda said: said.get("key") == "2")["key"] == "2"


def test_sinks_that_are_set_aside_are_as_if_masked(show: Open) -> None:
    recording = recorded()
    page = opened(show(recording, "#view=steps&layer=0&head=0&query=4&hidden=1"))
    row = recording[0][0, 0, 4].clone()
    row[0] = 0
    weights = [number(text) for text in column(page, "weight")]
    assert weights == pytest.approx((row / row.sum()).tolist(), rel=SHOWN)
    assert page.inner_text("#view-steps .note").startswith("The first and the special tokens are")


def test_the_steps_are_of_one_head_even_where_the_map_is_a_mean(show: Open) -> None:
    recording = recorded()
    page = opened(show(recording, "#view=steps&layer=0&head=1&query=4&key=2&heads=mean"))
    page.wait_for_selector('body[data-read="0,1,4,2,0"]')
    assert f"gives {three_digits(float(recording[0][0, 1, 4, 2]))} of" in sentence(page)


# What is not there


def test_without_values_it_says_how_to_see_the_output(show: Open) -> None:
    page = opened(show(notebook(), "#view=steps"))
    assert page.inner_text("#view-steps .note") == (
        "The output, weights times values, is not shown: there are no values here. "
        'regard record --values keeps them; in Python, observe(model, keep="qkv").'
    )


def test_of_weights_alone_there_are_no_vectors(show: Open) -> None:
    recording = recorded(mask=torch.arange(81).reshape(9, 9) % 3 != 1)
    page = opened(show(recording, "#view=steps&layer=0&head=0&query=4&order=position"))
    assert [number(text) for text in column(page, "weight")] == pytest.approx(
        recording[0][0, 0, 4].tolist(), rel=SHOWN
    )
    assert page.inner_text("#view-steps .note").startswith("Of this layer only the weights")


def test_of_a_small_map_there_are_no_steps(show: Open, tmp_path: Path) -> None:
    path = write_page(recorded(tokens=64), tmp_path / "small.html", layers=[0])
    page = show(path, "#view=steps&layer=1&query=20")
    page.wait_for_selector("body.ready")
    assert page.locator("#view-steps tbody tr").count() == 0
    assert page.inner_text("#view-steps .note").startswith("Only the small map of this layer")


def test_unfolding_the_last_keys_takes_the_focus_to_the_first_of_them(show: Open) -> None:
    page = opened(show(recorded(tokens=45), "#view=steps&query=44&key=3&order=position"))
    page.focus("#view-steps button:has-text('13 more of 13')")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-steps tbody [data-row='44']")
    assert page.locator("#view-steps [data-row='32'] :focus").count() == 1
