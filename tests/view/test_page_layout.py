"""The page on narrow and on wide screens: nothing is cut off, nothing lies over the words."""

import pytest
import torch

import regard
from pages import Open, recorded

pytestmark = [pytest.mark.browser, pytest.mark.full]

VIEWS = ["overview", "map", "text", "steps", "segments"]


def test_no_view_is_wider_than_the_screen(show: Open) -> None:
    page = show(recorded(heads=7, kv_heads=7))
    for width in (360, 700, 760, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 780})
        for view in VIEWS:
            page.evaluate(f"location.hash = 'view={view}&query=3&key=2'")
            page.wait_for_selector(f'body[data-view="{view}"][data-read]')
            assert page.evaluate("document.documentElement.scrollWidth") == width, (view, width)
    stage, text = (page.locator(name).bounding_box() for name in ("#stage", "#text"))
    assert stage
    assert text
    assert stage["x"] + stage["width"] <= text["x"] + 1


def test_the_line_under_the_text_hides_no_chosen_word(show: Open) -> None:
    tokens = [f" word{at}" for at in range(600)]
    recording = regard.Recording({"layer": recorded(tokens=600)[0]}, query_tokens=tokens)
    for width in (700, 760, 1099):
        size = {"width": width, "height": 780}
        page = show(recording, "#view=text&query=599", viewport=size)
        page.wait_for_selector("body[data-read]")
        word = page.locator("#view-text .chosen").first.bounding_box()
        line = page.locator("footer").bounding_box()
        assert word
        assert line
        assert word["y"] + word["height"] <= line["y"]


def test_the_whole_map_stands_above_the_line(show: Open) -> None:
    page = show(recorded(tokens=60), "#view=map")
    page.wait_for_selector("body[data-read]")
    for width in (700, 850, 1099):
        page.set_viewport_size({"width": width, "height": 680})
        drawn = page.locator(".map").first.bounding_box()
        line = page.locator("footer").bounding_box()
        assert drawn
        assert line
        assert drawn["y"] + drawn["height"] <= line["y"]


def test_both_texts_show_the_chosen_word_and_stand_in_step(show: Open) -> None:
    # Lines of many lengths: no block is as high as was thought before it is built.
    tokens = [f" {'word' * (at % 3)}{at}" + "\n" * (at % 37 == 0) for at in range(1998)]
    zeros = torch.zeros(1, 1998, 2)
    seen = regard.Recording({"layer": regard.attend(zeros, zeros)}, query_tokens=tokens)
    for query in (500, 1400, 1997):
        page = show(seen, f"#view=text&query={query}")
        page.wait_for_selector("body[data-read]")
        page.wait_for_timeout(500)  # blocks near the screen are built in the next frames
        view = page.locator("#view-text .reading").first.bounding_box()
        one, other = (page.locator("#view-text .chosen").nth(at).bounding_box() for at in (0, 1))
        assert view
        assert one
        assert other
        assert one["y"] == other["y"]
        assert view["y"] <= one["y"] <= view["y"] + view["height"] - one["height"]
