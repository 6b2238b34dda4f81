"""Parts of the text in the page: equal to the library's own segments."""

import pytest
import torch
from playwright.sync_api import Page, expect

import pages
import regard
from pages import Open

pytestmark = [pytest.mark.browser, pytest.mark.full]

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


def shares(page: Page) -> list[list[float]]:
    page.wait_for_selector("#view-segments td")
    rows = page.locator("#view-segments tbody tr")
    return [
        [float(cell) for cell in rows.nth(row).locator("td").all_inner_texts()]
        for row in range(rows.count())
    ]


def percent(weights: torch.Tensor) -> list[list[float]]:
    return [[float(f"{100 * w:.3g}") for w in row] for row in weights.tolist()]


@pytest.mark.parametrize("heads", ["one", "mean", "0.1_2.0"])
def test_sentences_draw_what_the_library_says(heads: str, show: Open) -> None:
    recording = three_sentences(mask=regard.Causal())
    page = show(recording, f"#view=segments&layer=1&head=1&heads={heads}&hidden=1")
    drawn = regard.segment_shares(recording, SENTENCES, sinks=False).weights
    chosen = {
        "one": drawn[1, 1],
        "mean": drawn[1].mean(0),
        "0.1_2.0": (drawn[0, 1] + drawn[2, 0]) / 2,
    }[heads]
    page.wait_for_selector("#view-segments td")
    for ours, theirs in zip(shares(page), percent(chosen), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def test_a_share_of_each_token_is_that_of_a_part_over_its_tokens(show: Open) -> None:
    recording = three_sentences()
    page = show(recording, "#view=segments&parts=words")
    names = page.locator("#view-segments tbody th")
    words = ["Life", "is", "short", "Eat", "dessert", "first", "Then", "rest"]
    expect(names).to_have_text([f"{at} {word}" for at, word in enumerate(words, start=1)])
    page.click("[data-set='parts=sentences']")
    page.click("[data-set='per=token']")
    expect(page.locator("#legend .unit")).to_contain_text("for each token")
    drawn = regard.segment_shares(recording, SENTENCES).weights[0, 0] / torch.tensor([4, 4, 3])
    for ours, theirs in zip(shares(page), percent(drawn), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)
    page.hover('#view-segments td[data-row="1"][data-column="2"]')
    assert "of its attention to each token of “Then rest.”" in page.inner_text("#view-segments")


def test_one_sentence_is_shown_by_its_words(show: Open) -> None:
    tokens = ["Life", " is", " short", "."]
    query, key = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(7)).unbind(0)
    recording = regard.Recording({"layer": regard.attend(query, key)}, query_tokens=tokens)
    page = show(recording, "#view=segments")
    expect(page.locator("#view-segments tbody th")).to_have_text(["1 Life", "2 is", "3 short"])


def test_pointing_at_a_cell_reads_it(show: Open) -> None:
    recording = three_sentences()
    page = show(recording, "#view=segments&layer=2&head=0")
    page.hover('#view-segments td[data-row="1"][data-column="2"]')
    weight = float(regard.segment_shares(recording, SENTENCES).weights[2, 0, 1, 2])
    line = page.inner_text("#view-segments .line").replace("\u202f", " ")
    share = pages.three_digits(weight)
    assert line == (
        f"“Eat dessert first.” gives {share} of its attention to “Then rest.”, layer 2 head 0."
    )


def test_parts_of_another_text_have_their_names_over_the_columns(show: Open) -> None:
    recording = regard.Recording(
        {"layer": regard.attend(torch.randn(1, 3, 2), torch.randn(1, 5, 2))},
        query_tokens=["Das", " ist", "."],
        key_tokens=["Life", " is", ".", " Eat", "."],
    )
    page = show(recording, "#view=segments")
    page.wait_for_selector("#view-segments td")
    names = page.locator("#view-segments thead th").all_inner_texts()
    assert names == ["gives to", "1 Life is.", "2 Eat."]


def test_the_next_head_leaves_the_focus_where_it_is(show: Open) -> None:
    page = show(three_sentences(), "#view=segments")
    place = "td[data-row='1'][data-column='2']"
    page.focus("#view-segments td[data-row='0'][data-column='2']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("]")
    page.wait_for_selector("#view-segments .line:has-text('layer 0 head 1')")
    assert page.locator(f"#view-segments {place}:focus").count() == 1


def test_names_of_parts_take_the_room_that_is_free(show: Open) -> None:
    torch.manual_seed(7)
    words = [regard.Token(f" wordwordword{i}") for i in range(4)]
    layer = regard.attend(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    recording = regard.Recording({"layer": layer}, query_tokens=words)
    page = show(
        recording, "#view=segments&parts=sentences", viewport={"width": 1440, "height": 900}
    )
    page.wait_for_selector("#view-segments td")
    name = page.locator("#view-segments tbody th")
    assert name.inner_text() == "1 wordwordword0 wordwordword1 wordwordword2 wordwordword3"
    assert name.evaluate("one => one.scrollWidth - one.clientWidth") == 0
