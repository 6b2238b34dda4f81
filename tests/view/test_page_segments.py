"""Parts of the text in the page: equal to the library's own segments."""

import pytest
import torch
from playwright.sync_api import Page, expect

import pages
import regard
from pages import Open, step, visit

pytestmark = pytest.mark.browser

TEXT = ["Life", " is", " short", ".", " Eat", " dessert", " first", ".", " Then", " rest", "."]
SENTENCES = {"one": (1, 5), "two": (5, 9), "three": (9, 12)}


def three_sentences(**options: object) -> regard.Recording:
    torch.manual_seed(7)
    tokens = [regard.Token("[CLS]", special=True), *map(regard.Token, TEXT)]
    layers = {
        f"layer.{i}": regard.attend(torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8), **options)
        for i in range(3)
    }
    return regard.Recording(layers, query_tokens=tokens)


def assert_shares(page: Page, expected: torch.Tensor) -> None:
    """The table has these shares, in percent."""
    rows = page.locator("#view-segments tbody tr")
    expect(rows).to_have_count(len(expected))
    for row, weights in enumerate(expected.tolist()):
        shown = [float(cell or 0) for cell in rows.nth(row).locator("td").all_inner_texts()]
        assert shown == pytest.approx([100 * weight for weight in weights], abs=0.051)


def line(page: Page, text: str) -> None:
    expect(page.locator("#view-segments .line")).to_contain_text(text.replace(" %", "\u202f%"))


def test_shares_of_parts_are_those_of_the_library(show: Open) -> None:
    recording = three_sentences(mask=regard.Causal())
    page = show(recording, "#view=segments&layer=1&head=1&hidden=1")
    drawn = regard.segment_shares(recording, SENTENCES, sinks=False).weights
    for heads, named, expected in [
        ("one", "layer 1 head 1", drawn[1, 1]),
        ("mean", "mean of the 2 heads of layer 1", drawn[1].mean(0)),
    ]:
        with step(f"heads={heads}"):
            visit(page, f"#view=segments&layer=1&head=1&heads={heads}&hidden=1")
            line(page, f"of a part, {named}, without sinks")
            assert_shares(page, expected)
    drawn = regard.segment_shares(recording, SENTENCES).weights
    with step("words"):
        visit(page, "#view=segments&parts=words")
        words = ["Life", "is", "short", "Eat", "dessert", "first", "Then", "rest"]
        expect(page.locator("#view-segments tbody th")).to_have_text(
            [f"{at} {word}" for at, word in enumerate(words, start=1)]
        )
    with step("pointing at a cell reads it"):
        visit(page, "#view=segments&layer=2&head=0")
        line(page, "of a part, layer 2 head 0")
        page.hover('#view-segments [data-row="2"] [data-column="0"]')
        share = pages.three_digits(float(drawn[2, 0, 2, 0]))
        line(page, f"“Then rest.” gives {share} of its attention to “Life is short.”, layer 2 head")
    with step("the next head leaves the focus where it is"):
        page.mouse.move(2, 2)
        page.focus("#view-segments [data-row='0'] [data-column='2']")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("]")
        line(page, "layer 2 head 1")
        focused = page.locator("#view-segments [data-row='1'] [data-column='2']:focus")
        expect(focused).to_have_count(1)


@pytest.mark.full
def test_names_of_parts_have_room_and_more_columns_are_announced(show: Open) -> None:
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(7))
    layer = regard.attend(x, x)
    with step("one sentence is shown by its words"):
        tokens = ["Life", " is", " short", "."]
        page = show(regard.Recording({"layer": layer}, query_tokens=tokens), "#view=segments")
        expect(page.locator("#view-segments tbody th")).to_have_text(["1 Life", "2 is", "3 short"])
    with step("parts of another text have their names over the columns"):
        recording = regard.Recording(
            {"layer": regard.attend(torch.randn(1, 3, 2), torch.randn(1, 5, 2))},
            query_tokens=["Das", " ist", "."],
            key_tokens=["Life", " is", ".", " Eat", "."],
        )
        page = show(recording, "#view=segments")
        page.wait_for_selector("#view-segments td")
        names = page.locator("#view-segments thead th").all_inner_texts()
        assert names == ["gives to", "1 Life is.", "2 Eat."]
    with step("names take the room that is free"):
        words = [regard.Token(f" wordwordword{i}") for i in range(4)]
        page = show(
            regard.Recording({"layer": layer}, query_tokens=words),
            "#view=segments&parts=sentences",
            viewport={"width": 1440, "height": 900},
        )
        page.wait_for_selector("#view-segments td")
        name = page.locator("#view-segments tbody th")
        assert name.inner_text() == "1 wordwordword0 wordwordword1 wordwordword2 wordwordword3"
        assert name.evaluate("one => one.scrollWidth - one.clientWidth") == 0
    with step("more columns than fit are announced"):
        words = [word for part in range(14) for word in (f"Part {part}", " ends", ".")]
        x = torch.randn(2, len(words), 8, generator=torch.Generator().manual_seed(7))
        recording = regard.Recording({"a": regard.attend(x, x)}, query_tokens=words)
        page = show(recording, "#view=segments", viewport={"width": 700, "height": 800})
        page.wait_for_selector("#view-segments .overflow:not([hidden])")
        page.evaluate("document.querySelector('#view-segments .scroller').scrollLeft = 1e6")
        page.wait_for_selector("#view-segments .overflow", state="hidden")
