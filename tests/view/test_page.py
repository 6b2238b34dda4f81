"""The page in a real browser: its numbers are the library's, and one moves through it."""

import random
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import regard
from pages import (
    WORDS,
    Open,
    Serve,
    address,
    go,
    level_at,
    ready,
    recorded,
    sentence,
    step,
    three_digits,
    visit,
)
from regard.recording.layers import Refusal
from regard.view.export.page_file import write_page

pytestmark = pytest.mark.browser

NAMES = ["[CLS]", *WORDS]


# Its numbers are the library's


def test_the_map_the_line_below_and_the_tables_have_the_librarys_numbers(show: Open) -> None:
    recording = recorded(heads=4, kv_heads=2, mask=regard.Causal())
    page = show(recording, "#layer=1&head=1&query=0&key=8")
    ready(page)
    with step("every cell of the map has its colour"):
        weights = recording[1][0, 1].to_dense()
        for query in range(9):
            for key in range(8):
                expected = round(float(weights[query, key]) * 255)
                assert abs(level_at(page, query, key) - expected) <= 1
    rng = random.Random(4)
    for _ in range(8):
        layer, head, query = rng.randrange(2), rng.randrange(4), rng.randrange(1, 9)
        key = rng.randrange(query)
        with step(f"the line reads layer {layer} head {head}, cell {query}, {key}"):
            go(page, layer, head, query, key)
            row = recording[layer][0, head, query]
            rank = 1 + int((row > row[key]).sum())
            assert sentence(page) == (
                f"“{NAMES[query].strip()}” gives {three_digits(float(row[key]))} of its attention "
                f"to “{NAMES[key]}” (rank {rank} of {query + 1}), layer {layer} head {head}."
            )
            value = float(page.inner_text("#value").removeprefix("weight "))
            assert value == pytest.approx(float(row[key]), rel=5.1e-4)  # four digits
    go(page, 0, 1, 8, 3)
    for table, weights in [("looks", recording[0][0, 1, 8]), ("looked", recording[0][0, 1][:, 3])]:
        with step(f"the table {table} lists the strongest"):
            order = [i for i in weights.argsort(descending=True).tolist() if weights[i] > 0]
            buttons = page.locator(f"#{table}-table button")
            expect(buttons).to_have_text([NAMES[i] for i in order])  # the tables come later


# Moving


def then_phrases_help_and_pointing(page: Page, recording: regard.Recording) -> None:
    with step("a phrase over several tokens is found"):
        page.keyboard.press("/")
        page.keyboard.type("DESSERT FIRST")
        page.keyboard.press("Enter")
        assert address(page, lambda said: said.get("query") == "6")["query"] == "6"
        page.keyboard.type(" never")
        page.keyboard.press("Enter")
        assert page.inner_text("#found") == "not in this text"
        page.locator("#find").blur()
    visit(page, "#query=4&key=3")
    page.wait_for_selector('body[data-read="0,0,4,3,0"]')
    ready(page)
    with step("help lists the keys, takes them, and closes"):
        page.keyboard.press("?")
        assert "move the crosshair" in page.inner_text("#help")
        assert page.evaluate("document.activeElement.id") == "help-title"
        assert page.evaluate("document.getElementById('help').scrollTop") == 0
        page.keyboard.press("]")
        page.keyboard.press("Escape")
        assert not page.is_visible("#help")
        assert page.input_value("#head") == "0"
    with step("pointing at a word tints what it looks at"):
        page.hover('#prose [data-at="3"]')
        strongest = int(recording[0][0, 0, 3].argmax())
        page.wait_for_selector(f'body[data-read="0,0,3,{strongest},0"]')
        assert page.get_attribute(f'#prose [data-at="{strongest}"]', "style")
        page.keyboard.press("d")
        page.hover('#prose [data-at="5"]')
        looker = int(recording[0][0, 0][:, 5].argmax())
        page.wait_for_selector(f'body[data-read="0,0,{looker},5,0"]')
    with step("a click on the map keeps the cell"):
        left, top, width, height = map(
            float, (page.get_attribute(".map", "data-frame") or "").split(",")
        )
        page.click(".map", position={"x": left + 6.5 * width, "y": top + 2.5 * height})
        page.wait_for_selector('body[data-read="0,0,2,6,0"]')
        page.mouse.move(2, 2)
        cell = ("2", "6")
        said = address(page, lambda said: (said["query"], said["key"]) == cell)
        assert (said["query"], said["key"]) == cell
    with step("a click on a small map opens its head"):
        page.click("#overview .heads button >> nth=-1")
        page.wait_for_selector('body[data-read^="1,1,"]')


def test_one_moves_by_address_keyboard_and_pointer(show: Open) -> None:
    recording = recorded()
    page = show(
        recording, "#layer=0&head=1&query=4&key=3&scale=log&side=looked&theme=dark&folded=1"
    )
    blocks = page.locator("script[id^=layer-]")
    there = "blocks => blocks.filter(({ text }) => text).map(({ id }) => id).sort()"
    with step("an address reopens what it names"):
        page.wait_for_selector('body[data-read="0,1,4,3,0"]')
        assert (page.input_value("#layer"), page.input_value("#head")) == ("0", "1")
        for pressed in ("scale=log", "side=looked"):
            assert page.get_attribute(f'[data-set="{pressed}"]', "aria-pressed") == "true"
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
        assert not page.is_visible("#prose")
    with step("numbers that were read leave the document"):
        assert blocks.evaluate_all(there) == ["layer-1-key", "layer-1-query", "layer-1-rows"]
        go(page, 1, 0, 3, 2)
        assert blocks.evaluate_all(there) == []
        go(page, 0, 0, 4, 1)
        assert "of its attention to" in sentence(page)
    with step("an address typed while the last state is being remembered wins"):
        page.evaluate(
            """() => {
              const last = location.href;
              location.hash = "layer=1&head=1&query=3&key=2";
              history.replaceState(null, "", last);
            }"""
        )
        page.wait_for_selector('body[data-read="1,1,3,2,0"]', timeout=20_000)
    with step("the keyboard moves and the address remembers"):
        visit(page, "#query=4&key=3")
        page.wait_for_selector('body[data-read="0,0,4,3,0"]')
        for key in ("ArrowDown", "ArrowLeft", "]", "}"):
            page.keyboard.press(key)
        expected = {"layer": "1", "head": "1", "query": "5", "key": "2"}
        assert address(page, lambda said: said == expected) == expected
    then_phrases_help_and_pointing(page, recording)


GROUND = """() => {
  const pen = document.querySelector("#legend canvas").getContext("2d");
  const first = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  return [getComputedStyle(document.body).backgroundColor, `rgb(${first.join(", ")})`];
}"""


def test_the_theme_follows_the_system_until_one_is_chosen(show: Open) -> None:
    page = show(recorded(mask=regard.Causal()), "#query=8&key=0", color_scheme="dark")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    for theme in ("dark", "light"):
        with step(f"{theme}: an empty cell has the colour of the ground"):
            ready(page)
            assert page.evaluate(scheme) == theme
            assert level_at(page, 0, 7) == 0
            ground, empty = page.evaluate(GROUND)
            assert ground == empty
        if theme == "dark":
            page.click("#theme")
            page.wait_for_selector(':root[data-theme="light"]')


# Small and long recordings, and what is not there


@pytest.mark.full
def test_one_head_and_one_token_are_enough(show: Open, tmp_path: Path) -> None:
    recording = recorded(heads=1, kv_heads=1, mask=regard.Causal()).part(["layer.0"])
    path = tmp_path / "small.html"
    write_page(recording, path, title="One head")
    page = show(path, "#query=6&key=5")
    ready(page)
    row = recording[0][0, 0, 6]
    assert sentence(page).startswith(
        f"“dessert” gives {three_digits(float(row[5]))} of its attention to “eat”"
    )
    with step("what only several heads have is hidden"):
        for part in (
            "#overview",
            ".of-heads",
            "[aria-label=Compare]",
            "[data-set='view=overview']",
        ):
            assert page.locator(part).first.is_hidden(), part
        assert page.locator("[data-set='view=text']").is_visible()
    page.keyboard.press("4")
    page.wait_for_selector("#view-steps table[data-ready]")
    headings = page.locator("#view-steps thead th").all_inner_texts()
    at = headings.index("weight") + 1
    shown = page.locator(f"#view-steps tbody tr > :nth-child({at})").all_inner_texts()
    shares = [float(text.replace("\u202f", "").removesuffix("%")) / 100 for text in shown]
    assert shares == pytest.approx(row.tolist(), rel=0.0051, abs=1e-12)
    for key in ["?", "Escape", *"[]{}+-0mclsdpt/12345"]:
        page.keyboard.press(key)  # the fixture fails on any error
    with step("a page of one token opens"):
        page = show(recorded(heads=1, kv_heads=1, tokens=1))
        page.wait_for_selector('body[data-read="0,0,0,0,0"]')
        assert (
            sentence(page)
            == "“[CLS]” gives 100 % of its attention to “[CLS]” (rank 1 of 1), layer 0 head 0."
        )
        visit(page, "#view=segments&parts=sentences")
        page.wait_for_selector("#view-segments .line:has-text('no parts')")
        line = page.inner_text("#view-segments .line")
        assert line == "There are no parts: the text has special tokens only."


@pytest.mark.full
def test_a_layer_that_is_not_in_the_file_says_so(show: Open, tmp_path: Path) -> None:
    recording = recorded(tokens=64)
    path = write_page(recording, tmp_path / "small.html", layers=[0])
    page = show(path, "#layer=1&head=1&query=20&key=41")
    with step("the map and its line"):
        share = float(recording[1][0, 1].pool(32, 32)[10, 20]) * 2
        page.wait_for_selector('body[data-read="1,1,20,41,0"]')
        words_, _, number = sentence(page).partition("about ")
        assert words_ == "Of tokens 20 to 21, "
        assert float(number.split()[0]) / 100 == pytest.approx(share, rel=0.05)
        notes = page.inner_text("#notes")
        assert notes.startswith("This file has not all of query and key of this layer: it has ")
        assert "means of blocks of 2 × 2 tokens" in notes
        assert "--layers 1 or a larger --limit" in notes
    with step("the text has the means"):
        visit(page, "#view=text&layer=1&query=20")
        page.wait_for_selector('#view-text [data-at][style*="background"]')
    with step("the steps"):
        visit(page, "#view=steps&layer=1&query=20")
        page.wait_for_selector("#view-steps .note:has-text('Only block means of this layer')")
        assert page.locator("#view-steps tbody tr").count() == 0
    with step("the layer that is in it"):
        go(page, 0, 1, 20, 41)
        assert page.inner_text("#notes") == ""


@pytest.mark.full
def test_refused_layers_are_counted_at_the_top_and_named_with_their_reason(
    show: Open, serve: Serve
) -> None:
    recording = recorded()
    reason = "its weights <b>changed</b>.\n    Change copies of them."
    recording.refused = [Refusal("attn.<i>", "model.py:7", reason)]
    note = (
        "1 layer was refused and is missing: attn.<i>. Reason (model.py:7): "
        "its weights <b>changed</b>. Change copies of them."
    )
    for page in (show(recording), serve(recording)[0]):
        expect(page.locator("#about")).to_have_text(re.compile("2 layers × .* · 1 layer refused$"))
        for view in ("overview", "map", "text", "steps", "segments"):
            visit(page, f"#view={view}")
            expect(page.locator("#notes li")).to_have_text([note])
            expect(page.locator("#notes")).to_be_visible()
