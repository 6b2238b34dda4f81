"""The overview: every head as a small map with its kind, in layers or sorted."""

import pytest
import torch
from playwright.sync_api import Page

import pages
import regard
from pages import Open, recorded

pytestmark = [pytest.mark.browser, pytest.mark.full]


def even_and_one(tokens: int = 9) -> regard.Recording:
    """Layer 0: a head that looks at itself, one that looks everywhere; layer 1: the other way."""
    itself, even = torch.eye(tokens), torch.full((tokens, tokens), 1 / tokens)
    layers = {"a": torch.stack((itself, even)), "b": torch.stack((even, itself))}
    return regard.Recording(
        {name: regard.AttentionMatrix.from_weights(w) for name, w in layers.items()}
    )


def heads(page: Page) -> list[str]:
    page.wait_for_selector("#view-overview button")
    labels = page.eval_on_selector_all(
        "#view-overview button", "all => all.map((one) => one.getAttribute('aria-label'))"
    )
    return [label.split(",")[0] for label in labels]


def test_a_click_or_the_arrows_and_enter_open_the_map_of_a_head(show: Open) -> None:
    page = show(recorded(), "#view=overview")
    page.click("#view-overview button >> nth=3")
    page.wait_for_selector('body[data-view="map"]')
    assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "1")
    page.evaluate("location.hash = 'view=overview&layer=0&head=0'")
    page.wait_for_selector('body[data-view="overview"]')
    page.locator('#view-overview button[aria-pressed="true"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector('body[data-view="map"]')
    assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "1")


def test_the_menu_sorts_the_heads_and_changes_the_address(show: Open) -> None:
    page = show(even_and_one(), "#view=overview")
    assert page.inner_text("#view-overview .count") == "4 heads"
    page.select_option("#view-overview .filters select", "kind")
    assert pages.address(page, lambda said: "sort" in said)["sort"] == "kind"
    page.wait_for_selector("#view-overview .row:only-child")
    order = [(0, 0), (1, 1), (0, 1), (1, 0)]
    assert heads(page) == [f"layer {layer} head {head}" for layer, head in order]


def test_without_kinds_the_maps_are_shown_in_layers(show: Open) -> None:
    weights = torch.full((1, 2, 5, 5), torch.nan)
    recording = regard.Recording({"layer": regard.AttentionMatrix.from_weights(weights)})
    page = show(recording, "#view=overview")
    assert heads(page) == ["layer 0 head 0", "layer 0 head 1"]
    assert page.is_hidden("#view-overview .filters")


def test_many_heads_are_on_one_screen_of_small_maps(show: Open) -> None:
    matrix = regard.attend(torch.randn(32, 7, 4), torch.randn(32, 7, 4))
    page = show(regard.Recording({f"layer.{i}": matrix for i in range(24)}), "#view=overview")
    assert len(heads(page)) == 768
    box = page.locator("#view-overview button >> nth=31").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 1280


@pytest.mark.parametrize("width", [390, 850, 1280])
def test_each_of_many_heads_stands_right_of_its_layer_with_its_kind(width: int, show: Open) -> None:
    viewport = {"width": width, "height": 844}
    page = show(recorded(heads=12, kv_heads=12), "#view=overview", viewport=viewport)
    page.wait_for_selector("#view-overview .kind:not(:empty)")
    cut = page.eval_on_selector_all(
        "#view-overview .kind",
        "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)",
    )
    assert cut == []
    lefts = page.eval_on_selector_all(
        "#view-overview .row:first-child button", "all => all.map((one) => one.offsetLeft)"
    )
    label = "#view-overview .row:first-child .layer"
    end = page.eval_on_selector(label, "one => one.offsetLeft + one.offsetWidth")
    assert len(lefts) == 12
    # On a phone the layer is a line over its heads.
    assert min(lefts) >= (end if width > 700 else 0)
    kind = page.locator("#view-overview button .kind").first
    assert kind.is_visible()
    about = page.locator("#view-overview button").first.get_attribute("aria-label")
    assert about is not None
    assert kind.inner_text() in about
