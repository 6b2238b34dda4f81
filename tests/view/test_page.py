"""The page in a real browser: its numbers are the library's, every key does its part."""

from pathlib import Path

import pytest

import regard
from pages import WORDS, Open, address, go, level_at, ready, recorded, sentence
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]

NO_WORKER = """
window.Worker = class {
  constructor() { setTimeout(() => this.onerror?.(new Event("error")), 20); }
  postMessage() {}
};
"""


# Its numbers are the library's


def test_both_tables_list_the_strongest(show: Open) -> None:
    recording = recorded()
    page = show(recording)
    go(page, 0, 1, 2, 3)
    names = ["[CLS]", *WORDS]
    for table, weights in [("looks", recording[0][0, 1, 2]), ("looked", recording[0][0, 1][:, 3])]:
        order = weights.argsort(descending=True).tolist()
        shown = page.locator(f"#{table}-table button").all_inner_texts()
        assert shown == [names[i] for i in order]


def test_a_map_with_more_tokens_than_pixels_shows_aligned_blocks(show: Open) -> None:
    page = show(recorded(tokens=800, mask=regard.Causal()))
    ready(page)
    cell = float((page.get_attribute(".map", "data-frame") or "").split(",")[2])
    # So many tokens that a block of two by two has one pixel and no colours are mixed.
    recording = recorded(tokens=2 * round(800 * cell), mask=regard.Causal())
    page = show(recording, "#layer=0&head=1&scale=linear&query=0&key=1")
    ready(page)
    means = recording[0][0, 1].to_dense().unfold(0, 2, 2).unfold(1, 2, 2).mean((-2, -1))
    for row, column in [(5, 2), (9, 9), (30, 11), (len(means) - 3, 40)]:
        # A block of keys is shown with what it gets in all.
        expected = round(2 * float(means[row, column]) * 255)
        assert abs(level_at(page, 2 * row, 2 * column) - expected) <= 1
    assert "2 keys" in page.inner_text("#legend .unit")


# Moving


def test_an_address_reopens_what_it_names(show: Open) -> None:
    page = show(
        recorded(), "#layer=1&head=1&query=5&key=2&scale=row&side=looked&theme=dark&folded=1"
    )
    page.wait_for_selector('body[data-read="1,1,5,2,0"]')
    assert page.input_value("#layer") == "1"
    assert page.get_attribute('[data-set="scale=row"]', "aria-pressed") == "true"
    assert page.get_attribute('[data-set="side=looked"]', "aria-pressed") == "true"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    assert not page.is_visible("#prose")


def test_an_address_typed_while_the_last_state_is_being_remembered_wins(show: Open) -> None:
    page = show(recorded())
    page.evaluate(
        """() => {
          const last = location.href;
          location.hash = "layer=1&head=1&query=3&key=2";
          history.replaceState(null, "", last);
        }"""
    )
    page.wait_for_selector('body[data-read="1,1,3,2,0"]', timeout=20_000)


def test_pointing_at_a_word_tints_what_it_looks_at(show: Open) -> None:
    recording = recorded()
    page = show(recording)
    page.hover('#prose [data-at="3"]')
    strongest = int(recording[0][0, 0, 3].argmax())
    page.wait_for_selector(f'body[data-read="0,0,3,{strongest},0"]')
    assert page.get_attribute(f'#prose [data-at="{strongest}"]', "style")
    page.keyboard.press("d")
    page.hover('#prose [data-at="5"]')
    looker = int(recording[0][0, 0][:, 5].argmax())
    page.wait_for_selector(f'body[data-read="0,0,{looker},5,0"]')


def test_a_click_on_the_map_keeps_the_cell(show: Open) -> None:
    page = show(recorded())
    ready(page)
    left, top, width, height = map(
        float, (page.get_attribute(".map", "data-frame") or "").split(",")
    )
    page.click(".map", position={"x": left + 6.5 * width, "y": top + 2.5 * height})
    page.wait_for_selector('body[data-read="0,0,2,6,0"]')
    page.mouse.move(2, 2)
    expected = {"layer": "0", "head": "0", "query": "2", "key": "6"}
    assert address(page, lambda said: said == expected) == expected


def test_a_click_on_a_small_map_opens_its_head(show: Open) -> None:
    page = show(recorded())
    box = page.locator("#overview canvas").bounding_box()
    assert box is not None
    page.click("#overview canvas", position={"x": box["width"] - 15, "y": box["height"] - 15})
    page.wait_for_selector('body[data-read^="1,1,"]')


def test_a_phrase_over_several_tokens_is_found(show: Open) -> None:
    page = show(recorded())
    page.keyboard.press("/")
    page.keyboard.type("EAT DESSERT")
    page.keyboard.press("Enter")
    assert address(page, lambda said: said.get("query") == "5")["query"] == "5"
    page.keyboard.type(" never")
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "not in this text"


def test_help_lists_the_keys_and_closes(show: Open) -> None:
    page = show(recorded())
    page.keyboard.press("?")
    assert "move the crosshair" in page.inner_text("#help")
    page.keyboard.press("]")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    assert page.input_value("#head") == "0"


# What it looks like


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_empty_cell_has_the_colour_of_the_ground(theme: str, show: Open) -> None:
    page = show(recorded(mask=regard.Causal()), "#query=8&key=0", color_scheme=theme)
    ready(page)
    assert level_at(page, 0, 7) == 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    first = (
        "document.querySelector('#legend canvas').getContext('2d').getImageData(0, 0, 1, 1).data"
    )
    red, green, blue, _ = page.evaluate(f"[...{first}]")
    assert ground == f"rgb({red}, {green}, {blue})"


def test_the_theme_follows_the_system_until_one_is_chosen(show: Open) -> None:
    page = show(recorded(), color_scheme="dark")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    assert page.evaluate(scheme) == "dark"
    page.click("#theme")
    page.wait_for_selector(':root[data-theme="light"]')
    assert page.evaluate(scheme) == "light"


# Sizes, long texts, damage


def test_one_token(show: Open) -> None:
    page = show(recorded(heads=1, kv_heads=1, tokens=1))
    page.wait_for_selector('body[data-read="0,0,0,0,0"]')
    assert (
        sentence(page)
        == "“[CLS]” gives 100 % of its attention to “[CLS]” (rank 1 of 1), layer 0 head 0."
    )


@pytest.mark.parametrize("script", [None, NO_WORKER], ids=["worker", "no worker"])
def test_a_long_text_opens(script: str | None, show: Open) -> None:
    recording = recorded(tokens=2048, heads=2, kv_heads=1, mask=regard.Causal())
    page = show(recording, script=script)
    ready(page)
    go(page, 0, 1, 2000, 1000)
    weight = float(recording[0][0, 1, 2000, 1000])
    shown = float(page.inner_text("#value").removeprefix("weight "))
    assert shown == pytest.approx(weight, rel=1e-4)


def test_numbers_that_were_read_leave_the_document(show: Open) -> None:
    page = show(recorded())
    there = "blocks => blocks.filter(({ text }) => text).map(({ id }) => id).sort()"
    blocks = page.locator("script[id^=layer-]")
    go(page, 0, 1, 3, 2)
    assert blocks.evaluate_all(there) == ["layer-1-key", "layer-1-query", "layer-1-rows"]
    go(page, 1, 0, 3, 2)
    assert blocks.evaluate_all(there) == []
    go(page, 0, 0, 4, 1)
    assert "of its attention to" in sentence(page)


def test_a_layer_that_is_not_in_the_file_says_so(show: Open, tmp_path: Path) -> None:
    recording = recorded(tokens=64)
    path = write_page(recording, tmp_path / "small.html", layers=[0])
    page = show(path, "#layer=1&head=1&query=20&key=41")
    share = float(recording[1][0, 1].pool(32, 32)[10, 20]) * 2
    words_, _, number = sentence(page).partition("about ")
    assert words_ == "Of tokens 20 to 21, "
    assert float(number.split()[0]) / 100 == pytest.approx(share, abs=0.002)
    notes = page.inner_text("#notes")
    assert notes.startswith("Only the small map of this layer is in this file")
    assert notes.endswith("the layers you want: regard.page(recording, path, layers=[1]).")
    go(page, 0, 1, 20, 41)
    assert page.inner_text("#notes") == ""
