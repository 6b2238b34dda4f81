"""Weights that are not numbers: the page says so, and never shows them as 0."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page

import pages
import regard
from pages import Open, go, level_at, ready, sentence
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]


def spoilt(**options: object) -> regard.Recording:
    """One query of the first head has a NaN."""
    query, key = torch.randn(2, 1, 2, 9, 8).unbind(0)
    query[0, 0, 3, 2] = torch.nan
    matrix = regard.attend(query, key, **options)
    return regard.Recording({"layer": matrix}, query_tokens=pages.words(9))


def looks(page: Page) -> str:
    return page.inner_text("#looks-table tbody").strip()


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="plain"), pytest.param({"mask": regard.Causal()}, id="causal")]
)
def test_a_row_that_is_not_numbers_says_so(options: dict[str, object], show: Open) -> None:
    page = show(spoilt(**options))
    go(page, 0, 0, 3, 1)
    assert sentence(page) == "“short”: its weights are not numbers (NaN), layer 0 head 0."
    assert looks(page) == "not numbers (NaN)"


def test_the_text_says_that_a_row_is_not_numbers(show: Open) -> None:
    page = show(spoilt(mask=regard.Causal()), "#view=text&layer=0&head=0&query=3")
    page.wait_for_selector("#sentence:has-text('short')")
    assert sentence(page).startswith("“short”: its weights are not numbers (NaN)")
    captions = page.locator("#view-text .side .caption").all_inner_texts()
    assert captions[0] == "Not numbers (NaN)"
    assert looks(page) == "not numbers (NaN)"


def test_a_word_whose_weight_is_not_a_number_is_grey(show: Open) -> None:
    page = show(spoilt(), "#view=text&layer=0&head=0&query=0")
    page.wait_for_selector("#sentence:has-text('looked at most by')")
    colour = "span => getComputedStyle(span).backgroundColor"
    grey = page.eval_on_selector('#view-text .side:nth-child(2) [data-at="3"]', colour)
    assert grey == "rgb(150, 150, 150)"
    captions = page.locator("#view-text .side .caption").all_inner_texts()
    assert captions[1].endswith("; grey: not numbers (NaN)")
    assert "9 weights not numbers (NaN)" in page.inner_text("#view-text .lines .caption")


def test_a_column_with_one_wrong_number_has_its_strongest(show: Open) -> None:
    recording = spoilt()
    page = show(recording, "#view=text&layer=0&head=0&query=0")
    page.wait_for_selector("#sentence:has-text('looked at most by')")
    best = recording[0].to_dense()[0, 0, :, 0].nan_to_num(0).argmax()
    assert page.inner_text("#looked-table tbody button >> nth=0") == ("[CLS]", *pages.WORDS)[best]


def test_on_the_map_what_is_not_a_number_has_a_colour_of_its_own(show: Open) -> None:
    page = show(spoilt(), "#layer=0&head=0&query=0&key=0")
    ready(page)
    assert level_at(page, 2, 4) >= 0
    assert level_at(page, 3, 4) == -1


def test_shares_of_parts_that_are_not_numbers_are_not_zero(show: Open) -> None:
    page = show(spoilt(), "#view=segments&layer=0&head=0")
    page.wait_for_selector("#view-segments td")
    assert "not a number" in page.inner_text("#view-segments table")


GREY = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const rows = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === 150 && data[i + 1] === 150 && data[i + 2] === 150)
      rows.add(Math.floor(i / 4 / canvas.width));
  return [...rows];
}"""


def test_on_a_small_map_a_row_that_is_not_numbers_has_that_colour(show: Open) -> None:
    page = show(spoilt(), "#view=overview")
    spoilt_one, other = page.locator("#view-overview button canvas").all()
    rows, height = spoilt_one.evaluate(GREY), spoilt_one.evaluate("canvas => canvas.height")
    assert {int(9 * row / height) for row in rows} == {3}
    assert other.evaluate(GREY) == []


@contextmanager
def served(browser: Browser, recording: regard.Recording, address: str) -> Iterator[Page]:
    serving = pages.Serving(recording)
    page = browser.new_page()
    page.goto(f"{serving.address}/?token={pages.TOKEN}{address}")
    yield page
    page.close()
    serving.end()


@pytest.mark.parametrize("host", ["file", "server"])
def test_a_layer_that_is_not_numbers_leaves_the_others_their_kinds(
    host: str, show: Open, browser: Browser
) -> None:
    layers = {"wrong": spoilt()[0], "right": pages.recorded()[0]}
    recording = regard.Recording(layers, query_tokens=pages.words(9))
    address = "#view=overview&layer=0"
    opened = (
        nullcontext(show(recording, address))
        if host == "file"
        else served(browser, recording, address)
    )
    with opened as page:
        page.wait_for_selector("#view-overview .row:nth-child(2) .kind:not(:empty)")
        buttons = page.locator("#view-overview .row:nth-child(2) button")
        kinds = tuple(buttons.locator(".kind").all_inner_texts())
        assert kinds == regard.heads(regard.Recording({"right": recording[1]}))["kind"]
        wrong = page.locator("#view-overview .row:nth-child(1) button").first
        assert wrong.get_attribute("aria-label") == "layer 0 head 0, no kind: not numbers (NaN)"
        assert page.inner_text("#notes") == (
            "The kinds of its heads are not known: some weights of this layer are not numbers "
            "(NaN)."
        )


def large(tmp_path: Path) -> Path:
    """Only block means fit; a block is 2 x 2 tokens."""
    query, key = torch.randn(2, 2, 600, 128, generator=torch.Generator().manual_seed(7))
    query[0, 400, 5] = torch.nan
    matrix = regard.attend(query, key, mask=regard.Causal())
    recording = regard.Recording({"layer": matrix})
    return write_page(recording, tmp_path / "large.html", limit=500_000)


def test_the_text_of_a_layer_too_large_for_its_file_says_so(show: Open, tmp_path: Path) -> None:
    page = show(large(tmp_path), "#view=text&layer=0&head=0&query=400")
    page.wait_for_selector("#sentence:has-text('400')")
    assert sentence(page).startswith("“400”: its weights are not numbers (NaN)")
    assert page.locator("#view-text .caption").all_inner_texts()[0] == "Not numbers (NaN)"


def test_a_block_mean_that_is_not_a_number_says_that_it_is_one(show: Open, tmp_path: Path) -> None:
    page = show(large(tmp_path))
    go(page, 0, 0, 401, 17)
    assert sentence(page).startswith(
        "“401”: its weights are not numbers (NaN) (means of blocks of 2 × 2 tokens, ± "
    )
    assert looks(page) == "not numbers (NaN)"
    go(page, 0, 0, 403, 17)
    assert sentence(page).startswith("Of tokens 402 to 403, about ")
