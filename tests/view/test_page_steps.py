"""The page's steps: every number is that of A.steps, and tells the sum that made it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

import regard
from pages import (
    Open,
    address,
    go,
    limit_of_16_bits,
    number,
    recorded,
    sentence,
    step,
    three_digits,
    visit,
)
from regard.view.export.page_file import write_page

pytestmark = pytest.mark.browser

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
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 6, 9, 4, generator=generator)
    key = torch.randn(1, 2, 9, 4, generator=generator)
    matrix = regard.attend(query, key, mask=regard.Causal())
    page = opened(
        show(regard.Recording({"a": matrix}), "#view=steps&head=1&query=3&order=position")
    )
    table = regard.steps(matrix[0, 1], query=3).table
    count = 9
    assert keys(page) == list(range(count))
    with step("every column"):
        for name, shown in [("query·key", "query·key"), ("scaled", "× "), ("weight", "weight")]:
            expected = [float(cell) for cell in table[name][:count]]
            assert [number(text) for text in column(page, shown)] == pytest.approx(
                expected, rel=SHOWN, abs=1e-12
            )
        scores = torch.tensor([float(cell) for cell in table["score"][:count]])
        assert [number(text) for text in column(page, "exp")] == pytest.approx(
            scores.exp().tolist(), rel=SHOWN
        )
        assert column(page, "mask") == ["yes" if may else "no" for may in table["mask"][:count]]
    with step("random products of query and key"):
        rng = random.Random(2)
        for _ in range(3):
            head, at = rng.randrange(6), rng.randrange(9)
            visit(page, f"#view=steps&head={head}&query={at}&order=position")
            page.wait_for_selector(
                f'#view-steps table[data-ready^="0,{head},false,position,32,{at},"]'
            )
            for place in range(9):
                cell = f'#view-steps [data-row="{place}"] [data-column="0"] .vector span'
                shown = [number(text) for text in page.locator(cell).all_inner_texts()]
                expected = query[0, head, at] * key[0, head // 3, place]
                assert shown == pytest.approx(expected.tolist(), rel=0.006)
    with step("each step has a sentence and its lesson"):
        explained = page.locator("#view-steps .explained dl")
        expect(explained).to_be_visible()
        assert explained.evaluate("""(list) => {
            const rows = document.querySelector("#view-steps tbody");
            return list.getBoundingClientRect().bottom <= rows.getBoundingClientRect().top;
        }""")
        names = page.locator("#view-steps .explained dt").all_inner_texts()
        columns = page.locator("#view-steps thead th").all_inner_texts()
        others = [name for name in columns if "key" not in name.split()[:1]][1:]
        assert names == ["query, key", *others]
        assert page.locator("#view-steps .explained dd").count() == len(names) + 1


# What the notebooks print


def notebook(**options: Any) -> regard.Recording:
    query = torch.tensor([[1.0, 0.0, 2.0], [2.0, 2.0, 2.0], [2.0, 1.0, 3.0]])
    key = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, -1.0]])
    matrix = regard.attend(query, key, **options)
    return regard.Recording({"layer": matrix}, query_tokens=["Life", " is", " short"])


@pytest.mark.full
def test_numbers_tell_their_sums_and_the_keyboard_goes_through_them(show: Open) -> None:
    line = "#view-steps .sum"
    with step("a masked row"):
        page = opened(show(notebook(mask=regard.Causal()), "#view=steps&query=1"))
        page.hover('#view-steps [data-row="0"] [data-column="5"]')
        assert page.inner_text(line).replace("\u202f", " ") == (
            "“Life”: weight = 10.1 / 10,286, the sum over all keys = 0.0979 %"
        )
    page = opened(show(notebook(), "#view=steps&query=1&key=0"))
    with step("the last row adds up"):
        scores = torch.tensor([4.0, 16.0, 8.0]) / 3**0.5
        total = f"{float(scores.exp().sum()):,.0f}"
        last = page.locator("#view-steps tfoot td").all_inner_texts()[-2:]
        assert last == [total, "100\u202f%"]
        page.hover('#view-steps tfoot [data-column="3"]')
        assert page.inner_text(line) == f"The sum of exp(score) over all 3 keys = {total}"
    with step("without values it says how to see the output"):
        assert page.inner_text("#view-steps .note") == (
            "The output, weights times values, is not shown: there are no values here. "
            'regard record --values keeps them; in Python, observe(model, keep="qkv").'
        )
    with step("the arrows go from number to number, and leave the query"):
        page.mouse.move(2, 2)
        page.focus('#view-steps [data-column][tabindex="0"]')
        for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert page.inner_text(line) == "“is”: scaled = 16 × 1/√3 = 9.24"
        page.keyboard.press("ArrowUp")
        assert page.inner_text(line) == "“Life”: scaled = 4 × 1/√3 = 2.31"
        assert address(page, lambda said: said.get("query") == "1")["query"] == "1"
    with step("outside the table they go to another query"):
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("ArrowUp")
        page.wait_for_selector('#view-steps h2:text("How “Life”")')
    with step("a click keeps the key"):
        page.click('#view-steps [data-row="2"] [data-column="0"]')
        assert address(page, lambda said: said.get("key") == "2")["key"] == "2"


# Many keys, and other heads


@pytest.mark.full
def test_the_strongest_come_first_and_more_on_demand_as_the_address_says(show: Open) -> None:
    recording = recorded(tokens=100)
    page = opened(show(recording, "#view=steps&query=50&key=3"))
    strongest = recording[0][0, 0, 50].argsort(descending=True, stable=True).tolist()
    with step("more on demand"):
        assert keys(page) == strongest[:32]
        page.focus("#view-steps button:has-text('32 more of 68')")
        page.keyboard.press("Enter")
        page.wait_for_selector('#view-steps table[data-ready$=",64"]')
        assert keys(page) == strongest[:64]
        assert address(page, lambda said: "steps" in said)["steps"] == "64"
    with step("the order by position"):
        page.click("text=By position")
        assert address(page, lambda said: said.get("order") == "position")["steps"] == "64"
        page.wait_for_selector('#view-steps table[data-ready*="position"]')
        assert keys(page) == list(range(64))
    with step("the address opens the same again"):
        page.reload()
        page.wait_for_selector("#view-steps tbody [data-row='63']")
        assert keys(page) == list(range(64))
    with step("the focus goes on to the first of the last ones; another query starts again"):
        page.click("#view-steps button:has-text('32 more of 36')")
        page.focus("#view-steps button:has-text('4 more of 4')")
        page.keyboard.press("Enter")
        page.wait_for_selector("#view-steps tbody [data-row='99']")
        assert page.locator("#view-steps [data-row='96'] :focus").count() == 1
        go(page, 0, 0, 51, 3, view="steps")
        page.wait_for_selector("#view-steps tbody:not(:has([data-row='32']))")


@pytest.mark.full
def test_sinks_means_weights_alone_and_half_precision(show: Open, tmp_path: Path) -> None:
    recording = recorded()
    with step("sinks that are set aside are as if masked"):
        page = opened(show(recording, "#view=steps&layer=0&head=0&query=4&hidden=1"))
        row = recording[0][0, 0, 4].clone()
        row[0] = 0
        weights = [number(text) for text in column(page, "weight")]
        assert weights == pytest.approx((row / row.sum()).tolist(), rel=SHOWN)
        note = page.inner_text("#view-steps .note")
        assert note.startswith("The first and the special tokens are")
    with step("the steps are of one head even where the map is a mean"):
        visit(page, "#view=steps&layer=0&head=1&query=4&key=2&heads=mean")
        page.wait_for_selector('body[data-read="0,1,4,2,0"]')
        assert f"gives {three_digits(float(recording[0][0, 1, 4, 2]))} of" in sentence(page)
    with step("they tell of the key that is read below"):
        visit(page, "#view=steps&query=7&key=6&order=position")
        page.wait_for_selector('body[data-read="0,0,7,6,0"]')
        page.wait_for_selector("#view-steps .sum:has-text('“dessert”')")
        page.wait_for_selector("#view-steps td.explaining")
        page.wait_for_selector("#view-steps tr.chosen")
        assert sentence(page).startswith("“first” gives ")
        assert "“dessert”" in sentence(page)
    with step("of weights alone there are no vectors"):
        alone = recorded(mask=torch.arange(81).reshape(9, 9) % 3 != 1)
        page = opened(show(alone, "#view=steps&layer=0&head=0&query=4&order=position"))
        assert [number(text) for text in column(page, "weight")] == pytest.approx(
            alone[0][0, 0, 4].tolist(), rel=SHOWN
        )
        assert page.inner_text("#view-steps .note").startswith("Of this layer only the weights")
    with step("half precision"):
        large = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(1)) * 40
        halves = regard.Recording({"layer": regard.attend(large, large / 900)})
        limit = limit_of_16_bits(halves, tmp_path)
        half = write_page(halves, tmp_path / "half.html", limit=limit)
        page = opened(show(half, "#view=steps&query=2"))
        dots = (large[0, 0, 2] @ large[0, 0].T / 900).tolist()
        # Half precision keeps 11 bits.
        assert [number(text) for text in column(page, "query·key")] == pytest.approx(
            dots, rel=0.01, abs=0.05
        )
        assert "in 16 bits" in page.inner_text("#notes")
