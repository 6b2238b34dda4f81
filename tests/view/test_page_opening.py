"""The first ten seconds with the page, what users stumbled over, and fingers instead of a mouse."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import regard
from pages import TOKEN, Open, Serving, address, ready, recorded, sentence

pytestmark = pytest.mark.browser

TEXT = ["[CLS]", "The", " baker", " sold", " bread", " to", " the", " sailor", ".", "[SEP]"]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def tokens(words: list[str]) -> list[regard.Token]:
    return [regard.Token(word, special=word.startswith("[")) for word in words]


def story() -> regard.Recording:
    """A head without a kind, and one that attends to the token before."""
    count = len(TEXT)
    mixed = torch.full((count, count), 0.04)
    mixed[torch.arange(count), (3 * torch.arange(count) + 2) % count] = 0.64
    previous = 0.9 * torch.eye(count).roll(-1, 1) + 0.01
    previous[0] = 1 / count
    weights = torch.stack((mixed, previous / previous.sum(-1, keepdim=True)))
    return regard.Recording(
        {"layer": regard.AttentionMatrix.from_weights(weights)}, query_tokens=tokens(TEXT)
    )


def test_a_fresh_page_opens_on_the_head_that_stands_out_at_a_content_word(show: Open) -> None:
    page = show(story(), "#")
    at = address(page, lambda said: "query" in said)
    assert (at["layer"], at["head"]) == ("0", "1")
    query, key = int(at["query"]), int(at["key"])
    assert key == query - 1
    assert len(TEXT[query].strip()) >= 4
    assert len(TEXT[key].strip()) >= 4
    assert page.inner_text("#introduction").replace("\u202f", " ") == (
        "Layer 0, head 1 is a previous-token head: each token attends to the one before it "
        f"({100 * regard.heads(story())['score'][1]:.0f} % of its attention on average)."
    )


def test_the_heads_that_stand_out_are_listed_and_open(show: Open) -> None:
    page = show(story())
    ready(page)
    button = page.locator("#notable button")
    assert button.all_inner_texts()[0].startswith("L0H1 previous token ")
    button.first.click()
    at = address(page, lambda said: said["head"] == "1")
    assert int(at["key"]) == int(at["query"]) - 1
    assert button.first.get_attribute("aria-pressed") == "true"


def test_the_line_that_explains_rows_and_columns_goes_when_it_is_understood(show: Open) -> None:
    page = show(recorded())
    ready(page)
    assert page.inner_text("#hint span") == (
        "Rows look, columns are looked at. Point at a cell; click to keep it."
    )
    page.click("#understood")
    assert page.is_hidden("#hint")
    page.reload()
    page.wait_for_selector("body.ready")
    assert page.is_hidden("#hint")


def test_the_scale_fits_the_weights_and_says_its_darkest_value(show: Open) -> None:
    count = 40
    faint = torch.full((count, count), 0.5 / count)
    faint[:, 0] += 0.45  # the sink, which does not count
    faint[torch.arange(count), (7 * torch.arange(count) + 3) % count] += 0.05
    recording = regard.Recording({"a": regard.AttentionMatrix.from_weights(faint)})
    page = show(recording, "#scale=fit")
    ready(page)
    assert "darkest = 8\u202f% or more" in page.inner_text("#legend .unit")
    darkest = page.evaluate(
        """() => {
          const canvas = document.querySelector(".map canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let least = 765;
          for (let i = 0; i < data.length; i += 4)
            if (data[i + 3]) least = Math.min(least, data[i] + data[i + 1] + data[i + 2]);
          return least;
        }"""
    )
    assert darkest < 250  # on the scale from 0 to 100 % the sink alone is so dark
    page.click("[data-set='scale=linear']")
    expect(page.locator("#legend .unit")).to_contain_text("linear")


@pytest.mark.full
def test_the_steps_tell_of_the_key_that_is_read_below(show: Open) -> None:
    page = show(recorded(), "#view=steps&query=7&key=6&order=position")
    page.wait_for_selector("#view-steps td.explaining")
    page.wait_for_selector("#view-steps tr.chosen")
    assert sentence(page).startswith("“first” gives ")
    assert "“dessert”" in sentence(page)
    assert page.inner_text("#view-steps .sum").startswith("“dessert”")


@pytest.mark.full
def test_segments_say_that_there_are_more_columns(show: Open) -> None:
    words = [word for part in range(14) for word in (f"Part {part}", " ends", ".")]
    x = torch.randn(1, len(words), 8, generator=torch.Generator().manual_seed(7))
    recording = regard.Recording({"a": regard.attend(x, x)}, query_tokens=words)
    page = show(recording, "#view=segments", viewport={"width": 850, "height": 800})
    page.wait_for_selector("#view-segments .overflow:not([hidden])")
    page.evaluate("document.querySelector('#view-segments .scroller').scrollLeft = 1e6")
    page.wait_for_selector("#view-segments .overflow", state="hidden")


@pytest.mark.full
def test_numbers_above_words_are_not_cut(show: Open) -> None:
    page = show(recorded(), "#view=text&query=5", viewport={"width": 390, "height": 844})
    page.wait_for_selector("#view-text [data-share]")
    ends = page.eval_on_selector_all(
        "#view-text [data-share]",
        """all => all.map((one) => {
          const scroller = one.closest(".reading").getBoundingClientRect();
          const box = one.getBoundingClientRect();
          const width = parseFloat(getComputedStyle(one, "::before").width);
          const left = one.classList.contains("at-end") ? box.right - width : box.left;
          return [left - scroller.left, scroller.right - left - width];
        })""",
    )
    assert all(before >= -1 and after >= -1 for before, after in ends)


@pytest.mark.full
def test_the_overview_names_heads_and_gives_mixed_ones_no_number(show: Open) -> None:
    page = show(story(), "#view=overview")
    page.wait_for_selector("#view-overview .kind:not(:empty)")
    tile = page.locator("#view-overview button")
    assert tile.locator(".name").all_inner_texts() == ["H0", "H1"]
    assert tile.locator(".score").all_inner_texts()[0] == ""
    tile.nth(1).hover()
    assert page.inner_text("#view-overview .details").startswith("layer 0 head 1, previous token")


@pytest.mark.full
def test_two_maps_side_by_side_keep_their_numbers(show: Open) -> None:
    page = show(recorded(), "#compare=beside", viewport={"width": 1440, "height": 900})
    ready(page)
    widths = [
        float((one.get_attribute("data-frame") or "").split(",")[2])
        for one in page.locator(".map").all()
    ]
    assert min(widths) >= 40  # pixels from which a cell has its number


def zoom(page: Page) -> float:
    return float(address(page, lambda said: "zoom" in said)["zoom"])


def middle(page: Page) -> tuple[float, float]:
    box = page.locator(".map").first.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_wheel_and_a_double_click_zoom_where_nothing_scrolls(show: Open) -> None:
    page = show(recorded(tokens=128))
    ready(page)
    page.mouse.move(*middle(page))
    page.mouse.wheel(0, -200)
    page.mouse.move(2, 2)  # a cell that is pointed at is not in the address
    assert zoom(page) == pytest.approx(2, rel=0.01)
    page.mouse.dblclick(*middle(page))
    page.mouse.move(2, 2)
    address(page, lambda said: float(said["zoom"]) > 3)
    assert zoom(page) == pytest.approx(4, rel=0.01)


def test_two_fingers_zoom_and_the_map_is_on_the_first_screen_of_a_phone(show: Open) -> None:
    page = show(recorded(tokens=128), **PHONE)
    ready(page)
    box = page.locator(".map").first.bounding_box()
    assert box is not None
    assert box["y"] + 250 < 844
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    x, y = middle(page)
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, apart: float) -> None:
        points = [] if kind == "touchEnd" else [{"x": x - apart, "y": y}, {"x": x + apart, "y": y}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 30)
    for apart in (40, 60, 90):
        fingers("touchMove", apart)
    fingers("touchEnd", 0)
    assert zoom(page) == pytest.approx(3, rel=0.1)


@pytest.mark.full
def test_what_a_thumb_presses_has_44_pixels_and_nothing_sticks_out(show: Open) -> None:
    page = show(recorded(), **PHONE)
    for view in ("overview", "map", "text", "steps", "segments"):
        page.evaluate(f"location.hash = 'view={view}&query=3&key=2'")
        page.wait_for_selector(f'body[data-view="{view}"][data-read]')
        small = page.eval_on_selector_all(
            "#tabs button, .choices button, .tools button, .filters select, #understood, #theme",
            """all => all.filter((one) => one.offsetParent).filter((one) => {
              const { width, height } = one.getBoundingClientRect();
              return width < 44 || height < 44;
            }).map((one) => one.outerHTML)""",
        )
        assert small == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_special_tokens_have_one_spelling(show: Open, tmp_path: Path) -> None:
    page = show(story())
    ready(page)
    assert page.inner_text("#sinks") == "Hide [CLS], [SEP]"
    assert page.locator("#prose .special").all_inner_texts() == ["[CLS]", "[SEP]"]


@pytest.mark.full
def test_a_short_recording_that_is_served_opens_there_too(browser: Browser) -> None:
    serving = Serving(story())
    page = browser.new_page()
    try:
        page.goto(f"{serving.address}/?token={TOKEN}")
        page.wait_for_selector("body.ready")
        assert page.inner_text("#introduction").startswith(
            "Layer 0, head 1 is a previous-token head"
        )
    finally:
        page.close()
        serving.end()
