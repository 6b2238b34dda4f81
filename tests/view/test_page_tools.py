"""Heads in colours, pinned cells, products of query and key, and heads that are found late."""

import json
import random
from urllib.parse import unquote

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, expect

import pages
import regard
from pages import TOKEN, Open, Serving, address, ready, recorded, three_digits
from regard.view.server import http_server

pytestmark = [pytest.mark.browser, pytest.mark.full]

LEAST = 0.01  # the weight from which a line is drawn


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("−", "-")


def number(text: str) -> float:
    """A number as the page writes it; of a small one also its power of ten."""
    raised = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
    mantissa, _, power = plain(text).partition(" × 10")
    return float(mantissa) * 10.0 ** int(power.translate(raised) or 0)


def lines(page: Page) -> set[tuple[str, int, int]]:
    """The colour, the query and the key of each line."""
    found = page.eval_on_selector_all(
        "#view-text line",
        "all => all.map((one) => [one.getAttribute('stroke'), one.dataset.query, one.dataset.key])",
    )
    return {(colour, int(query), int(key)) for colour, query, key in found}


def test_each_chosen_head_has_lines_of_its_own_colour(show: Open) -> None:
    recording = recorded(heads=4, kv_heads=4, mask=regard.Causal())
    chosen = sorted(random.Random(2).sample([(i, j) for i in range(2) for j in range(4)], 3))
    heads = "_".join(f"{layer}.{head}" for layer, head in chosen)
    page = show(recording, f"#view=text&layer=0&head=0&heads={heads}")
    page.wait_for_selector("#view-text line", state="attached")
    colours = page.eval_on_selector_all(
        "#view-text .toggles [aria-pressed=true] .patch", "all => all.map((one) => one.style.color)"
    )
    assert len(colours) == 3
    found = lines(page)
    by_colour: dict[str, set[tuple[int, int]]] = {}
    for colour, query, key in found:
        by_colour.setdefault(colour, set()).add((query, key))
    expected = [
        {
            (query, key)
            for query, key in (recording[layer][0, head].to_dense() >= LEAST).nonzero().tolist()
        }
        for layer, head in chosen
    ]
    assert sorted(by_colour.values(), key=sorted) == sorted(expected, key=sorted)


def test_a_press_shows_and_hides_the_lines_of_a_head(show: Open) -> None:
    page = show(recorded(heads=3, kv_heads=3), "#view=text&layer=1&head=0")
    page.wait_for_selector("#view-text line", state="attached")
    assert len({colour for colour, _, _ in lines(page)}) == 1
    page.click("#view-text .toggles button:has-text('H2')")
    assert address(page, lambda said: "heads" in said)["heads"] == "1.0_1.2"
    page.wait_for_function(
        "new Set([...document.querySelectorAll('#view-text line')]"
        ".map((one) => one.getAttribute('stroke'))).size === 2"
    )
    page.click("#view-text .toggles button:has-text('H0')")
    assert address(page, lambda said: said.get("heads") == "1.2")["heads"] == "1.2"


def test_a_pinned_cell_and_its_note_are_in_the_address(show: Open) -> None:
    recording = recorded()
    rng = random.Random(7)
    layer, head, query, key = rng.randrange(2), rng.randrange(2), rng.randrange(9), rng.randrange(9)
    page = show(recording, f"#layer={layer}&head={head}&query={query}&key={key}")
    ready(page)
    page.keyboard.press("p")
    weight = float(recording[layer][0, head, query, key])
    value = page.locator("#pins .value")
    expect(value).to_have_text(three_digits(weight).replace(" ", "\u202f"))
    page.fill("#pins input", 'a "note" & more_~')
    page.press("#pins input", "Tab")
    pins = address(page, lambda said: "note" in said.get("pins", ""))["pins"]
    assert json.loads(unquote(pins)) == [[layer, head, query, key, 'a "note" & more_~']]
    page.reload()
    page.wait_for_selector("#pins:not([hidden])")
    assert page.input_value("#pins input") == 'a "note" & more_~'
    expect(value).to_have_text(three_digits(weight).replace(" ", "\u202f"))
    page.click("#pins [aria-label^='Take away']")
    expect(page.locator("#pins")).to_be_hidden()


def test_pins_show_the_librarys_weights_and_open_their_cells(show: Open) -> None:
    recording = recorded(mask=regard.Causal())
    rng = random.Random(1)
    cells = [
        [rng.randrange(2), rng.randrange(2), rng.randrange(9), rng.randrange(9)] for _ in range(6)
    ]
    page = show(recording, f"#pins={json.dumps([[*cell, ''] for cell in cells])}")
    values = page.locator("#pins .value")
    for at, (layer, head, query, key) in enumerate(cells):
        weight = float(recording[layer][0, head, query, key])
        expect(values.nth(at)).to_have_text(three_digits(weight).replace(" ", "\u202f"))
    page.click("#pins li:nth-child(4) button >> nth=0")
    layer, head, query, key = cells[3]
    page.wait_for_selector(f'body[data-read="{layer},{head},{query},{key},0"]')


def test_each_product_of_query_and_key_is_the_librarys(show: Open) -> None:
    torch.manual_seed(2)
    query, key = torch.randn(2, 1, 3, 5, 4).unbind(0)
    recording = regard.Recording({"a": regard.attend(query, key)})
    rng = random.Random(2)
    head, at = rng.randrange(3), rng.randrange(5)
    page = show(recording, f"#view=steps&head={head}&query={at}&order=position")
    page.wait_for_selector("#view-steps table[data-ready]")
    for place in range(5):
        cells = page.locator(f'#view-steps [data-row="{place}"] [data-column="0"] .vector span')
        shown = [number(text) for text in cells.all_inner_texts()]
        expected = [float(number) for number in query[0, head, at] * key[0, head, place]]
        assert shown == pytest.approx(expected, rel=0.006)


def test_each_step_has_a_sentence_and_its_lesson(show: Open) -> None:
    page = show(recorded(mask=regard.Causal()), "#view=steps&query=3")
    page.wait_for_selector("#view-steps table[data-ready]")
    page.click("text=What the steps are")
    names = page.locator("#view-steps .explained dt").all_inner_texts()
    columns = page.locator("#view-steps thead th").all_inner_texts()
    assert names == ["query, key", *[name for name in columns if "key" not in name.split()[:1]][1:]]
    assert page.locator("#view-steps .explained dd").count() == len(names) + 1


def test_a_long_recording_that_is_served_says_that_it_looks_for_heads(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_AT_ONCE", 0)
    previous = 0.9 * torch.eye(9).roll(-1, 1) + 0.01
    previous[0] = 1 / 9
    weights = torch.stack((torch.full((9, 9), 1 / 9), previous / previous.sum(-1, keepdim=True)))
    recording = regard.Recording(
        {"layer": regard.AttentionMatrix.from_weights(weights)}, query_tokens=pages.words(9)
    )
    serving = Serving(recording)
    page = browser.new_page()
    page.set_default_timeout(120_000)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    try:
        page.route("**/api/heads*", hold)
        page.goto(f"{serving.address}/?token={TOKEN}")
        expect(page.locator("#introduction")).to_have_text(
            "Looking at every head for those that stand out; they will be listed here."
        )
        page.wait_for_timeout(200)
        while not held:
            page.wait_for_timeout(50)
        held[0].continue_()
        page.click("#introduction .offer")
        page.wait_for_selector('body[data-read^="0,1,"]')
        assert page.inner_text("#introduction").startswith(
            "Layer 0, head 1 is a previous-token head"
        )
        assert page.locator("#introduction .offer").count() == 0
    finally:
        page.close()
        serving.end()


def test_a_thirteenth_pin_is_refused_in_a_sentence(show: Open) -> None:
    note = "<img src=x onerror=alert(1)>"  # which stays text
    pins = [[0, 0, query, key, note] for query in range(2) for key in range(6)]
    page = show(recorded(), f"#query=8&key=8&pins={json.dumps(pins)}")
    ready(page)
    page.keyboard.press("p")
    assert pages.sentence(page) == "At most 12 cells can be pinned; take one away first."
    assert page.locator("#pins li").count() == 12
    assert page.input_value("#pins input >> nth=0") == note
    assert page.locator("#pins img").count() == 0
