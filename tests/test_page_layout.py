"""The page on narrow and on wide screens: nothing is cut off, nothing lies over the words."""

import pytest

import regard
from pages import Open, recorded

pytestmark = pytest.mark.browser

VIEWS = ["overview", "map", "text", "steps", "segments"]


@pytest.mark.parametrize("width", [360, 760])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_the_screen(view: str, width: int, show: Open) -> None:
    size = {"width": width, "height": 780}
    page = show(recorded(heads=7, kv_heads=7), f"#view={view}", viewport=size)
    page.wait_for_selector(f'body[data-view="{view}"][data-read]')
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [700, 760, 1099])
def test_the_line_under_the_text_hides_no_chosen_word(width: int, show: Open) -> None:
    tokens = [f" word{at}" for at in range(600)]
    recording = regard.Recording({"layer": recorded(tokens=600)[0]}, query_tokens=tokens)
    size = {"width": width, "height": 780}
    page = show(recording, "#view=text&query=599", viewport=size)
    page.wait_for_selector("body[data-read]")
    word = page.locator("#view-text .chosen").first.bounding_box()
    line = page.locator("footer").bounding_box()
    assert word
    assert line
    assert word["y"] + word["height"] <= line["y"]
