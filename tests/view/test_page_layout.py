"""The page on narrow and on wide screens: nothing is cut off, nothing lies over the words."""

import pytest
import torch

import regard
from pages import Open, recorded, step

pytestmark = pytest.mark.browser

VIEWS = ["overview", "map", "text", "steps", "segments"]


def test_no_view_is_wider_than_the_screen_and_the_whole_map_stands_above_the_line(
    show: Open,
) -> None:
    page = show(recorded(heads=7, kv_heads=7, tokens=60))
    for width in (360, 390, 700, 760, 850, 1280, 1440, 2560):
        page.set_viewport_size({"width": width, "height": 780})
        for view in VIEWS:
            with step(f"{view} at {width} pixels"):
                page.evaluate(f"location.hash = 'view={view}&query=3&key=2'")
                page.wait_for_selector(f'body[data-view="{view}"][data-read]')
                assert page.evaluate("document.documentElement.scrollWidth") == width
    with step("the text stands right of the stage"):
        stage, text = (page.locator(name).bounding_box() for name in ("#stage", "#text"))
        assert stage
        assert text
        assert stage["x"] + stage["width"] <= text["x"] + 1
    page.evaluate("location.hash = 'view=map&query=3&key=2'")
    page.wait_for_selector('body[data-view="map"]')
    for width in (700, 850, 1099):
        with step(f"the map stands above the line at {width} pixels"):
            page.set_viewport_size({"width": width, "height": 680})
            drawn = page.locator(".map").first.bounding_box()
            line = page.locator("footer").bounding_box()
            assert drawn
            assert line
            assert drawn["y"] + drawn["height"] <= line["y"]


@pytest.mark.full
def test_no_chosen_word_of_a_long_text_is_hidden_and_both_texts_stand_in_step(show: Open) -> None:
    tokens = [f" word{at}" for at in range(600)]
    recording = regard.Recording({"layer": recorded(tokens=600)[0]}, query_tokens=tokens)
    for width in (700, 760, 1099):
        with step(f"above the line at {width} pixels"):
            size = {"width": width, "height": 780}
            page = show(recording, "#view=text&query=599", viewport=size)
            page.wait_for_selector("body[data-read]")
            word = page.locator("#view-text .chosen").first.bounding_box()
            line = page.locator("footer").bounding_box()
            assert word
            assert line
            assert word["y"] + word["height"] <= line["y"]
    # Lines of many lengths: no block is as high as was thought before it is built.
    tokens = [f" {'word' * (at % 3)}{at}" + "\n" * (at % 37 == 0) for at in range(1998)]
    zeros = torch.zeros(1, 1998, 2)
    seen = regard.Recording({"layer": regard.attend(zeros, zeros)}, query_tokens=tokens)
    for query in (500, 1400, 1997):
        with step(f"both texts are at word {query}"):
            page = show(seen, f"#view=text&query={query}")
            page.wait_for_selector("body[data-read]")
            page.wait_for_timeout(500)  # blocks near the screen are built in the next frames
            view = page.locator("#view-text .reading").first.bounding_box()
            chosen = page.locator("#view-text .chosen")
            one, other = (chosen.nth(at).bounding_box() for at in (0, 1))
            assert view
            assert one
            assert other
            assert one["y"] == other["y"]
            assert view["y"] <= one["y"] <= view["y"] + view["height"] - one["height"]
