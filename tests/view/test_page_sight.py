"""What one sees: nothing that is cut, touches, repeats itself or says a thing in two numbers."""

import pytest
import torch
from playwright.sync_api import Page, expect

import regard
from pages import Open, ready, recorded, step, visit

pytestmark = pytest.mark.browser

CUT = """scroller => {
  const box = scroller.getBoundingClientRect();
  const [, above, below] = /inset\\(([\\d.]+)px \\S+ ([\\d.]+)(?:px)?\\)/.exec(
    getComputedStyle(scroller).clipPath) ?? [0, 0, 0];
  const [top, bottom] = [box.top + Number(above), box.top + scroller.clientHeight - Number(below)];
  return [...scroller.querySelectorAll("[data-at]")]
    .map(span => span.getBoundingClientRect())
    .filter(one => [top, bottom].some(edge => one.top + 6 < edge && one.bottom - 6 > edge)).length;
}"""

NUMBERS_CUT = """scroller => {
  const [, above] = /inset\\(([\\d.]+)px/.exec(getComputedStyle(scroller).clipPath) ?? [0, 0];
  const top = scroller.getBoundingClientRect().top + Number(above);
  return [...scroller.querySelectorAll("[data-share]")]
    .map(span => span.getBoundingClientRect())
    .filter(one => one.bottom > top && one.top - 8 < top && one.top + 6 > top).length;
}"""


def story(length: int) -> regard.Recording:
    torch.manual_seed(5)
    tokens = ["[CLS]"] + [f" word{at}" for at in range(1, length)]
    inputs = torch.randn(2, 1, 2, length, 8) * 1.5
    return regard.Recording(
        {"layer": regard.attend(*inputs, mask=regard.Causal())},
        query_tokens=[regard.Token(text, special=text == "[CLS]") for text in tokens],
    )


@pytest.mark.full
def test_nothing_is_cut_wraps_or_stands_askew(show: Open) -> None:
    page = show(story(600), "#view=text&query=400")
    page.wait_for_selector("body[data-read]")
    with step("no line of a text is cut through its letters, wherever it is scrolled"):
        for place in (0, 7, 333, 1234):
            page.evaluate(
                "at => { document.querySelector('#view-text .reading').scrollTop = at }", place
            )
            page.wait_for_timeout(100)
            for scroller in page.locator("#view-text .reading").all():
                assert scroller.evaluate(CUT) == 0
    with step("the number above a token of the first line is seen whole"):
        page.locator("#view-text .side").nth(0).get_by_text("Go to the strongest").click()
        page.wait_for_timeout(100)
        assert page.locator("#view-text [data-share]").first.is_visible()
        for scroller in page.locator("#view-text .reading").all():
            # At this place the first line is scrolled to the edge exactly.
            scroller.evaluate(
                "e => { e.scrollTop += e.querySelector('[data-share]').getBoundingClientRect().top"
                " - e.getBoundingClientRect().top - 8 }"
            )
        page.wait_for_timeout(100)
        for scroller in page.locator("#view-text .reading").all():
            assert scroller.evaluate(NUMBERS_CUT) == 0
    with step("two maps stand side by side in one line, with cells of one size"):
        visit(page, "#view=map&compare=beside&query=40&key=7&zoom=8")
        page.wait_for_selector('.pane:nth-child(2) .map[data-ready]:not([data-ready=""])')
        one, other = (page.locator(f".pane:nth-child({at}) .map") for at in (1, 2))
        assert one.get_attribute("data-frame") == other.get_attribute("data-frame")
        boxes = [one.bounding_box(), other.bounding_box()]
        assert boxes[0]
        assert boxes[1]
        assert boxes[0]["y"] == boxes[1]["y"]
    with step("legends stand on one line"):
        for more in ("", "&compare=difference&with=0.1", "&scale=log", "&hidden=1"):
            visit(page, f"#view=map&query=40&key=7{more}")
            ready(page)
            page.wait_for_timeout(100)
            unit = page.locator("#legend .unit")
            assert unit.evaluate("e => e.getClientRects().length && e.offsetHeight") < 20
            assert unit.evaluate("e => e.scrollWidth - e.clientWidth") <= 0


def rows(page: Page, table: str) -> list[str]:
    texts = page.locator(f"{table} tr").all_inner_texts()
    return [" ".join(text.replace("\u202f", " ").split()) for text in texts]


def test_tokens_with_one_weight_are_one_row(show: Open) -> None:
    zeros = torch.zeros(1, 9, 4)
    even = regard.Recording({"layer": regard.attend(zeros, zeros)}, query_tokens=["a"] * 9)
    page = show(even, "#query=3&key=2")
    page.wait_for_selector('body[data-read="0,0,3,2,0"]')
    for table in ("#looks-table", "#looked-table"):
        assert rows(page, table) == ["a 0 and 8 more, each 11.1 %"]


@pytest.mark.full
def test_what_is_hidden_or_blank_does_not_catch_the_eye(show: Open) -> None:
    with step("small maps follow when sinks are set aside"):
        page = show(recorded(), "#scale=fit")
        ready(page)
        drawn = "document.querySelector('#overview canvas').toDataURL()"
        before = page.evaluate(drawn)
        page.click("#sinks")
        page.wait_for_selector('#sinks[aria-pressed="true"]')
        page.wait_for_timeout(100)
        assert page.evaluate(drawn) != before
    with step("a space has a line under it, and is no dark bar"):
        inputs = torch.eye(3)[None] * 9
        spaces = regard.Recording(
            {"layer": regard.attend(inputs, inputs)}, query_tokens=["a", "  ", "b"]
        )
        page = show(spaces, "#query=1&key=1")
        page.wait_for_selector('body[data-read="0,0,1,1,0"]')
        blank = page.locator('#prose [data-at="1"]')
        style = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).boxShadow]"
        ground, line = blank.evaluate(style)
        assert ground == "rgba(0, 0, 0, 0)"
        assert line != "none"
    with step("a finger taps"):
        page = show(recorded(), "#", has_touch=True, is_mobile=True)
        expect(page.locator("#hint .of-touch")).to_be_visible()
        expect(page.locator("#hint .of-mouse")).to_be_hidden()
    with step("a page without a title has the beginning of its text"):
        assert page.inner_text("#title") == "Life is short , eat dessert first and"
        assert page.title().startswith("Life is short")


@pytest.mark.full
def test_columns_start_and_end_on_the_screen(show: Open) -> None:
    page = show(story(600), "#query=400&key=399", viewport={"width": 1440, "height": 900})
    page.wait_for_selector('body[data-read="0,0,400,399,0"]')
    with step("two tables begin at one height, though one heading is of two lines"):
        page.evaluate("document.querySelector('#looked-caption').textContent += ' and more words'")
        tops = [page.locator(f"#{name}-table").bounding_box() for name in ("looks", "looked")]
        assert tops[0]
        assert tops[1]
        assert tops[0]["y"] == tops[1]["y"]
    with step("the steps fit a narrow screen, to the weight at their end"):
        page.set_viewport_size({"width": 850, "height": 1000})
        visit(page, "#view=steps&query=400&key=399")
        page.wait_for_selector("#view-steps tbody tr")
        width = "e => e.scrollWidth - e.clientWidth"
        assert page.eval_on_selector("#view-steps .scroller", width) <= 0
    with step("few parts of a text are no corner of a large screen"):
        page.set_viewport_size({"width": 2560, "height": 1300})
        page = show(recorded(), "#view=segments&parts=words", viewport=page.viewport_size)
        table = page.locator("#view-segments table")
        expect(table).to_be_visible()
        stage = page.locator("#stage").bounding_box()
        box = table.bounding_box()
        assert stage
        assert box
        assert box["width"] > stage["width"] / 2


@pytest.mark.full
def test_segments_use_the_whole_screen(show: Open) -> None:
    page = show(story(600), "#view=segments&parts=words", viewport={"width": 1440, "height": 900})
    page.wait_for_selector("#view-segments table")
    expect(page.locator("#text")).to_be_hidden()
    for width in (1440, 850):
        page.set_viewport_size({"width": width, "height": 900})
        assert (
            page.eval_on_selector("#view-segments .scroller", "e => e.scrollWidth - e.clientWidth")
            <= 0
        )
