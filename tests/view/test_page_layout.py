"""The page on narrow and on wide screens: nothing is cut off, nothing lies over the words."""

from pathlib import Path

import pytest
import torch

import regard
from pages import Open, recorded, step
from regard.view.export.page_file import write_page

pytestmark = pytest.mark.browser

VIEWS = ["overview", "map", "text", "steps", "segments"]
IS_SEEN = """(element) => {
    const { top, bottom } = element.getBoundingClientRect();
    const around = element.closest("#prose, #overview").getBoundingClientRect();
    return top >= around.top && bottom <= around.bottom;
}"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "widths",
    [
        (390, 1440),
        pytest.param((360, 700, 760, 850, 1280, 2560), marks=pytest.mark.full),
    ],
    ids=["two", "more"],
)
def test_no_view_is_wider_than_the_screen(widths: tuple[int, ...], show: Open) -> None:
    page = show(recorded(heads=7, kv_heads=7, tokens=60))
    for width in widths:
        page.set_viewport_size({"width": width, "height": 780})
        for view in VIEWS:
            with step(f"{view} at {width} pixels"):
                page.evaluate(f"location.hash = 'view={view}&query=3&key=2'")
                page.wait_for_selector(f'body[data-view="{view}"][data-read]')
                assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.full
def test_what_the_page_is_of_is_not_cut(show: Open, tmp_path: Path) -> None:
    recording = recorded(heads=7, kv_heads=7, tokens=60)
    recording.model = "a model with a name of many words"
    title = "The keys to the cabinet are on the table of the kitchen"
    page = show(write_page(recording, tmp_path / "page.html", title=title))
    for width in (700, 1110, 1240, 1300, 1440):
        with step(f"at {width} pixels"):
            page.set_viewport_size({"width": width, "height": 780})
            for name in ("#title", "#about"):
                assert page.eval_on_selector(name, "e => e.scrollWidth - e.clientWidth") <= 0
            lines = "parts => parts.map((part) => part.getClientRects().length)"
            assert page.eval_on_selector_all("#about span", lines) == [1, 1]


@pytest.mark.full
def test_the_whole_map_stands_above_the_line(show: Open) -> None:
    page = show(recorded(heads=7, kv_heads=7, tokens=60))
    page.set_viewport_size({"width": 2560, "height": 780})
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


@pytest.mark.full
def test_the_small_maps_of_thirty_layers_leave_room_for_the_heads_that_stand_out(
    show: Open,
) -> None:
    even = regard.attend(torch.zeros(9, 12, 4), torch.zeros(9, 12, 4), mask=regard.Causal())
    page = show(regard.Recording({f"layer.{number}": even for number in range(30)}))
    page.set_viewport_size({"width": 1440, "height": 780})
    page.wait_for_selector("#notable li")
    assert page.locator("#notable li").last.evaluate(IS_SEEN)
    # Both at once: the maps shrink once more when the list of heads is there.
    apart = page.eval_on_selector_all(
        ".heads.beside button",
        "([one, two]) => two.getBoundingClientRect().left - one.getBoundingClientRect().right",
    )
    assert apart > 2  # each has an edge of one pixel


@pytest.mark.full
def test_there_is_no_empty_band_under_a_map(show: Open) -> None:
    page = show(recorded())
    for width in (390, 850):
        with step(f"{width} pixels"):
            page.set_viewport_size({"width": width, "height": 1000})
            page.wait_for_timeout(200)
            frame = page.get_attribute(".map", "data-frame") or ""
            _, top, _, height = map(float, frame.split(","))
            drawn = page.eval_on_selector(".map", "map => map.getBoundingClientRect().top") + top
            legend = page.locator("#legend").bounding_box()
            assert legend
            assert legend["y"] - (drawn + 9 * height) < 40


@pytest.mark.full
@pytest.mark.parametrize(
    ("view", "last"),
    [
        ("steps", "#view-steps .note"),
        pytest.param("segments", "#view-segments table", marks=pytest.mark.full),
        pytest.param("text", ".lined", marks=pytest.mark.full),
    ],
)
def test_few_tokens_fill_a_large_screen(show: Open, view: str, last: str) -> None:
    page = show(recorded())
    page.set_viewport_size({"width": 2560, "height": 1440})
    page.evaluate(f"location.hash = 'view={view}&query=3&key=2&parts=words'")
    page.wait_for_selector(f'body[data-view="{view}"][data-read]')
    drawn = page.locator(last).bounding_box()
    line = page.locator("footer").bounding_box()
    assert drawn
    assert line
    assert 0.75 * line["y"] < drawn["y"] + drawn["height"] <= line["y"]


@pytest.mark.full
def test_the_text_shows_the_chosen_token_and_what_it_looks_at_where_both_fit(show: Open) -> None:
    count = 600
    weights = torch.full((count, count), 0.1 / (count - 1))
    keys = (torch.arange(count) - 40).clamp(min=0)
    weights[torch.arange(count), keys] = 0.9
    tokens = [f" word{number}" for number in range(count)]
    matrix = regard.AttentionMatrix.from_weights(weights[None])
    page = show(regard.Recording({"layer": matrix}, query_tokens=tokens), "#query=100&key=60")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("location.hash = 'query=400&key=360'")
    page.wait_for_selector('#prose .chosen[data-at="400"]')
    assert page.locator("#prose .chosen").evaluate(IS_SEEN)
    assert page.locator("#prose .other").inner_text() == "word360"
    assert page.locator("#prose .other").evaluate(IS_SEEN)
