"""Heads that are found late."""

import pytest
import torch
from playwright.sync_api import Browser, Route, expect

import pages
import regard
from pages import TOKEN, Serving
from regard.view.server import http_server

pytestmark = pytest.mark.browser


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
