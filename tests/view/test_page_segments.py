"""Parts of the text in the page: equal to the library's own segments, as a table and as flows."""

import csv
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import Page

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


@pytest.mark.parametrize("of", ["head", "layer", "all"])
def test_sentences_draw_what_the_library_says(of: str, show: Open) -> None:
    recording = three_sentences(mask=regard.Causal())
    page = show(recording, f"#view=segments&layer=1&head=1&of={of}&hidden=1")
    drawn = regard.segment_shares(recording, SENTENCES, sinks=False).weights
    chosen = {"head": drawn[1, 1], "layer": drawn[1].mean(0), "all": drawn.mean((0, 1))}[of]
    page.wait_for_selector("#view-segments td")
    for ours, theirs in zip(shares(page), percent(chosen), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def test_a_pattern_finds_the_parts(show: Open) -> None:
    recording = three_sentences()
    page = show(recording, f"#view=segments&parts=pattern&pattern={quote('dessert first|rest')}")
    weights = regard.segment_shares(recording, {"a": (6, 8), "b": (10, 11)}).weights[0, 0]
    for ours, theirs in zip(shares(page), percent(weights), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)
    assert page.locator("#view-segments tbody th").all_inner_texts() == [
        "1 dessert first",
        "2 rest",
    ]


def test_a_typed_pattern_is_in_the_address_and_comes_back(show: Open) -> None:
    page = show(three_sentences(), "#view=segments")
    page.fill("#view-segments input", "eat & [a-z]+ #1")
    page.keyboard.press("Enter")
    said = pages.address(page, lambda said: "pattern" in said)
    assert said["pattern"] == quote("eat & [a-z]+ #1", safe="")
    page.reload()
    page.wait_for_selector("body.ready")
    assert page.input_value("#view-segments input") == "eat & [a-z]+ #1"
    assert page.inner_text("#view-segments .line") == "Nothing in the text fits the pattern."


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


def test_flows_are_as_thick_as_the_shares(show: Open) -> None:
    recording = three_sentences()
    page = show(recording, "#view=segments&form=flows&layer=0&head=0")
    page.wait_for_selector("#view-segments path")
    thick = page.eval_on_selector_all(
        "#view-segments path",
        """all => all.map((path) => {
          const [, y1, y2] = path.getAttribute("d").match(/^M\\S+ (\\S+)C.* \\S+ (\\S+)Z$/);
          return [Number(path.dataset.row), Number(path.dataset.column), y2 - y1];
        })""",
    )
    weights = regard.segment_shares(recording, SENTENCES).weights[0, 0]
    ratios = [height / float(weights[row, column]) for row, column, height in thick]
    assert len(thick) == 9
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-3)


def test_the_numbers_are_saved_as_a_table(show: Open, tmp_path: Path) -> None:
    recording = three_sentences()
    page = show(recording, "#view=segments")
    page.wait_for_selector("#view-segments td")
    page.click("#save summary")
    with page.expect_download() as download:
        page.click("[data-save=csv]")
    download.value.save_as(tmp_path / "segments.csv")
    with (tmp_path / "segments.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == [
        "part",
        "Life is short.",
        "Eat dessert first.",
        "Then rest.",
    ]
    weights = regard.segment_shares(recording, SENTENCES).weights[0, 0]
    assert [float(cell) for cell in rows[2][1:]] == pytest.approx(weights[1].tolist(), rel=1e-5)


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


def test_flows_are_reached_by_the_keyboard_and_have_names(show: Open) -> None:
    page = show(three_sentences(), "#view=segments&form=flows&layer=0&head=0")
    page.wait_for_selector("#view-segments path")
    page.focus("#view-segments [data-set='form=flows']")
    page.keyboard.press("Tab")
    said = []
    for _ in range(3):
        said.append(page.inner_text("#view-segments .line").split(" gives ")[0])
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    line = page.inner_text("#view-segments .line")
    assert said == ["“Life is short.”"] * 3
    assert line.startswith("“Life is short.” gives ")
    assert "of its attention to “Then rest.”" in line
    names = page.get_by_role("img").filter(has=page.locator("title"))
    assert names.count() == 9
    assert names.first.get_attribute("tabindex") == "-1"


@pytest.mark.parametrize(
    ("form", "place"),
    [
        pytest.param("table", "td[data-row='1'][data-column='2']", id="cell"),
        pytest.param("flows", "path[data-row='1'][data-column='2']", id="flow"),
    ],
)
def test_the_next_head_leaves_the_focus_where_it_is(form: str, place: str, show: Open) -> None:
    page = show(three_sentences(), f"#view=segments&form={form}")
    page.focus(f"#view-segments {place}")
    page.keyboard.press("]")
    page.wait_for_selector("#view-segments .line:has-text('layer 0 head 1')")
    assert page.locator(f"#view-segments {place}:focus").count() == 1


def test_names_of_parts_take_the_room_that_is_free(show: Open) -> None:
    torch.manual_seed(7)
    words = [regard.Token(f" wordwordword{i}") for i in range(4)]
    layer = regard.attend(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    recording = regard.Recording({"layer": layer}, query_tokens=words)
    page = show(recording, "#view=segments", viewport={"width": 1440, "height": 900})
    page.wait_for_selector("#view-segments td")
    name = page.locator("#view-segments tbody th")
    assert name.inner_text() == "1 wordwordword0 wordwordword1 wordwordword2 wordwordword3"
    assert name.evaluate("one => one.scrollWidth - one.clientWidth") == 0
