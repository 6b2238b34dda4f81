"""Weights that are not numbers: the page says so, and never shows them as 0."""

import pytest
import torch
from playwright.sync_api import Page

import pages
import regard
from pages import Open, go, level_at, ready, sentence

pytestmark = pytest.mark.browser


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


def test_a_column_with_one_wrong_number_has_its_strongest(show: Open) -> None:
    recording = spoilt()
    page = show(recording, "#view=text&layer=0&head=0&query=0")
    page.wait_for_selector("#sentence:has-text('looked at most by')")
    best = recording[0].to_dense()[0, 0, :, 0].nan_to_num(0).argmax()
    assert page.inner_text("#looked-table tbody button >> nth=0") == ("CLS", *pages.WORDS)[best]


def test_on_the_map_what_is_not_a_number_has_a_colour_of_its_own(show: Open) -> None:
    page = show(spoilt(), "#layer=0&head=0&query=0&key=0")
    ready(page)
    assert level_at(page, 2, 4) >= 0
    assert level_at(page, 3, 4) == -1


def test_shares_of_parts_that_are_not_numbers_are_not_zero(show: Open) -> None:
    page = show(spoilt(), "#view=segments&layer=0&head=0")
    page.wait_for_selector("#view-segments td")
    assert "not a number" in page.inner_text("#view-segments table")
