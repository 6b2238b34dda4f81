"""Heads in colours, and heads that are found late."""

import random

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, expect

import pages
import regard
from pages import TOKEN, Open, Serving, address, recorded, step, visit
from regard.view.server import http_server

pytestmark = pytest.mark.browser

LEAST = 0.01  # the weight from which a line is drawn


def lines(page: Page) -> set[tuple[str, int, int]]:
    """The colour, the query and the key of each line."""
    found = page.eval_on_selector_all(
        "#view-text line",
        "all => all.map((one) => [one.getAttribute('stroke'), one.dataset.query, one.dataset.key])",
    )
    return {(colour, int(query), int(key)) for colour, query, key in found}


def wait_for_colours(page: Page, count: int) -> None:
    """Waits until the lines have so many colours."""
    found: set[str] = set()
    for _ in range(100):
        found = {colour for colour, _, _ in lines(page)}
        if len(found) == count:
            break
        page.wait_for_timeout(100)
    assert len(found) == count


@pytest.mark.full
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
    with step("a press shows and hides the lines of a head"):
        visit(page, "#view=text&layer=1&head=0")
        wait_for_colours(page, 1)
        page.click("#view-text .toggles button:has-text('H2')")
        assert address(page, lambda said: "heads" in said)["heads"] == "1.0_1.2"
        wait_for_colours(page, 2)
        page.click("#view-text .toggles button:has-text('H0')")
        assert address(page, lambda said: said.get("heads") == "1.2")["heads"] == "1.2"


@pytest.mark.full
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
