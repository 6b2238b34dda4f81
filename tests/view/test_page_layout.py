"""The page on narrow and on wide screens: nothing is cut off, nothing lies over the words."""

import pytest

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
    page.evaluate("location.hash = 'view=map&query=3&key=2'")
    page.wait_for_selector('body[data-view="map"]')
    with step("the text stands right of the stage"):
        stage, text = (page.locator(name).bounding_box() for name in ("#stage", "#text"))
        assert stage
        assert text
        assert stage["x"] + stage["width"] <= text["x"] + 1
    for width in (700, 850, 1099):
        with step(f"the map stands above the line at {width} pixels"):
            page.set_viewport_size({"width": width, "height": 680})
            drawn = page.locator(".map").first.bounding_box()
            line = page.locator("footer").bounding_box()
            assert drawn
            assert line
            assert drawn["y"] + drawn["height"] <= line["y"]
