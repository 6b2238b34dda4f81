"""The page in a browser: each view opens and shows the library's numbers.

These tests run in ``make test``. The other browser tests are marked ``full``.
"""

import csv
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page

import pages
import regard
from pages import Open, address, go, level_at, ready, recorded, sentence, three_digits
from regard.view.export.page_file import page_text

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
# Three digits are shown: half of the last one is at most 0.5 % of the number.
SHOWN = 0.0051

pytestmark = pytest.mark.browser


def column(page: Page, table: str, name: str) -> list[str]:
    """The cells of the column whose heading starts with a name."""
    headings = page.locator(f"{table} thead th").all_inner_texts()
    place = next(i for i, text in enumerate(headings) if text.startswith(name))
    cells = page.locator(f"{table} tbody tr > :nth-child({place + 1})").all_inner_texts()
    return [cell.strip() for cell in cells]


def share(text: str) -> float:
    return float(text.replace("\u202f", "").removesuffix("%")) / 100


def test_the_page_opens_on_a_map_with_the_colour_of_every_cell(show: Open) -> None:
    recording = recorded(mask=regard.Causal())
    page = show(recording, "#layer=1&head=1&query=0&key=8")
    ready(page)
    weights = recording[1][0, 1].to_dense()
    for query in range(9):
        for key in range(8):
            expected = round(float(weights[query, key]) * 255)
            assert abs(level_at(page, query, key) - expected) <= 1


def test_the_line_below_reads_a_cell_of_grouped_heads(show: Open) -> None:
    recording = recorded(heads=4, kv_heads=2)
    page = show(recording)
    go(page, 1, 3, 6, 5)
    row = recording[1][0, 3, 6]
    rank = 1 + int((row > row[5]).sum())
    assert sentence(page) == (
        f"“dessert” gives {three_digits(float(row[5]))} of its attention to “eat” "
        f"(rank {rank} of 9), layer 1 head 3."
    )
    value = float(page.inner_text("#value").removeprefix("weight "))
    assert value == pytest.approx(float(row[5]), rel=1e-5)


def test_a_page_of_one_head_has_the_map_and_the_steps(show: Open, tmp_path: Path) -> None:
    recording = recorded(heads=1, kv_heads=1, mask=regard.Causal()).part(["layer.0"])
    path = tmp_path / "small.html"
    path.write_text(page_text(recording, title="One head", is_small=True))
    page = show(path, "#query=6&key=5")
    ready(page)
    row = recording[0][0, 0, 6]
    assert page.locator("#tabs button:visible").all_inner_texts() == ["Map", "Steps"]
    assert sentence(page).startswith(
        f"“dessert” gives {three_digits(float(row[5]))} of its attention to “eat”"
    )
    page.keyboard.press("4")
    page.wait_for_selector("#view-steps table[data-ready]")
    shown = [share(text) for text in column(page, "#view-steps", "weight")]
    assert shown == pytest.approx(row.tolist(), rel=SHOWN, abs=1e-12)
    for key in ["?", "Escape", *"[]{}+-0mclsdpt/12345"]:
        page.keyboard.press(key)  # the fixture fails on any error


def test_the_overview_names_every_head_with_its_kind(show: Open) -> None:
    itself, even = torch.eye(9), torch.full((9, 9), 1 / 9)
    weights = regard.AttentionMatrix.from_weights(torch.stack((itself, even)))
    page = show(regard.Recording({"a": weights}), "#view=overview")
    page.wait_for_selector("#view-overview button")
    labels = page.eval_on_selector_all(
        "#view-overview button", "all => all.map((one) => one.getAttribute('aria-label'))"
    )
    first, second = [label.replace("\u202f", " ") for label in labels]
    assert first.startswith("layer 0 head 0, self, score 100 %, entropy 0 %")
    assert second.startswith("layer 0 head 1, uniform, score 100 %, entropy 100 %, sinks 11.1 %")


def test_the_steps_are_those_of_the_library(show: Open) -> None:
    recording = recorded(mask=regard.Causal())
    page = show(recording, "#view=steps&layer=1&head=1&query=3&order=position")
    page.wait_for_selector("#view-steps table[data-ready]")
    table = regard.steps(recording[1][0, 1], query=3).table
    expected = [float(cell) for cell in table["weight"][:9]]
    shown = [share(text) for text in column(page, "#view-steps", "weight")]
    assert shown == pytest.approx(expected, rel=SHOWN, abs=1e-12)
    expected = ["yes" if may else "no" for may in table["mask"][:9]]
    assert column(page, "#view-steps", "mask") == expected


def test_the_text_shows_both_ways_of_a_token(show: Open) -> None:
    recording = recorded()
    page = show(recording, "#view=text&layer=1&head=1&query=5")
    page.wait_for_selector('body[data-read="1,1,5,5,0"]')
    row, by = recording[1][0, 1, 5], recording[1][0, 1][:, 5]
    words = ["[CLS]", *pages.WORDS]
    assert sentence(page) == (
        f"“eat” looks most at “{words[int(row.argmax())]}”: {three_digits(float(row.max()))}; "
        f"“eat” is looked at most by “{words[int(by.argmax())]}”: "
        f"{three_digits(float(by.max()))}, layer 1 head 1."
    )


def test_segments_are_those_of_the_library(show: Open) -> None:
    tokens = ["Life", " is", " short", ".", " Eat", " dessert", "."]
    query, key = torch.randn(2, 1, 2, 7, 8, generator=torch.Generator().manual_seed(7))
    recording = regard.Recording({"a": regard.attend(query, key)}, query_tokens=tokens)
    page = show(recording, "#view=segments&layer=0&head=1")
    page.wait_for_selector("#view-segments td")
    weights = regard.segment_shares(recording, {"one": (0, 4), "two": (4, 7)}).weights[0, 1]
    shown = [float(cell) for cell in page.locator("#view-segments td").all_inner_texts()]
    assert shown == pytest.approx((100 * weights).flatten().tolist(), rel=SHOWN)


def test_the_cells_on_the_screen_are_saved_as_a_table(show: Open, tmp_path: Path) -> None:
    recording = recorded()
    page = show(recording, "#layer=1&head=1")
    ready(page)
    page.click("#save summary")
    with page.expect_download() as download:
        page.click("[data-save=csv]")
    download.value.save_as(tmp_path / "cells.csv")
    with (tmp_path / "cells.csv").open(encoding="utf-8-sig", newline="") as file:
        _, *rows = csv.reader(file)
    numbers = torch.tensor([[float(cell) for cell in row[3:]] for row in rows])
    torch.testing.assert_close(numbers, recording[1][0, 1].to_dense(), atol=1e-6, rtol=1e-5)


def test_the_page_of_a_server_shows_its_numbers(browser: Browser) -> None:
    recording = recorded()
    serving = pages.Serving(recording)
    page = browser.new_page()
    page.set_default_timeout(120_000)
    try:
        page.goto(f"{serving.address}/?token={pages.TOKEN}#layer=0&head=1&query=5&key=2")
        page.wait_for_selector('body[data-read="0,1,5,2,0"]')
        assert three_digits(float(recording[0][0, 1, 5, 2])) in sentence(page)
        serving.changed = True
        page.locator(".map").first.press("ArrowUp")
        page.wait_for_selector("#damage:not([hidden])")
        said = page.inner_text("#damage")
    finally:
        page.close()
        serving.end()
    assert said == "the recording has changed on disk; start regard serve again."


def test_the_keyboard_moves_and_the_address_remembers(show: Open) -> None:
    page = show(recorded(), "#query=4&key=3")
    for key in ("ArrowDown", "ArrowLeft", "]", "}"):
        page.keyboard.press(key)
    expected = {"layer": "1", "head": "1", "query": "5", "key": "2"}
    assert address(page, lambda said: said == expected) == expected


@pytest.mark.skipif(not AXE.exists(), reason="axe-core comes with `make lint`")
def test_axe_finds_no_grave_barrier_on_the_map(show: Open) -> None:
    page = show(recorded(mask=regard.Causal()), "#view=map")
    page.wait_for_selector('body[data-view="map"][data-read]')
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    grave = [one for one in found["violations"] if one["impact"] in {"serious", "critical"}]
    assert [one["id"] for one in grave] == []


def test_hostile_tokens_are_shown_and_nothing_runs(show: Open) -> None:
    texts = [
        "<script>document.title = 'pwned'</script>",
        " </style></script><img src=x onerror=\"document.title='pwned'\">",
        " \u202eevil\u2066",
        "\x00null",
        "\ud800",
        " --><!--",
    ]
    matrix = recorded(tokens=len(texts))[0]
    recording = regard.Recording(
        {"<img src=x onerror=alert(1)>": matrix},
        model="<script>alert(2)</script>",
        query_tokens=[regard.Token(text) for text in texts],
    )
    page = show(recording)
    ready(page)
    for at in range(len(texts)):
        go(page, 0, 0, at, at)
    assert "pwned" not in page.title()
    assert page.locator("#prose img, #prose script, #prose style").count() == 0
    assert page.inner_text('#prose [data-at="0"]') == texts[0]
    assert page.inner_text('#prose [data-at="2"]') == "‹RLO›evil‹LRI›"


def test_a_row_that_is_not_numbers_says_so(show: Open) -> None:
    query, key = torch.randn(2, 1, 2, 9, 8).unbind(0)
    query[0, 0, 3, 2] = torch.nan
    recording = regard.Recording({"a": regard.attend(query, key)}, query_tokens=pages.words(9))
    page = show(recording)
    go(page, 0, 0, 3, 1)
    assert sentence(page) == "“short”: its weights are not numbers (NaN), layer 0 head 0."
    assert page.inner_text("#looks-table tbody").strip() == "not numbers (NaN)"


def test_an_error_of_the_page_fails_its_test(browser: Browser, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="error: oh"), pages.opener(browser, tmp_path) as show:
        show(recorded(), script="setTimeout(() => { throw Error('oh') })")
