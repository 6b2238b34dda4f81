"""The overview: every head as a small map with its kind, in layers or sorted."""

import pytest
import torch
from playwright.sync_api import Page

import pages
import regard
from pages import Open, step, visit

pytestmark = pytest.mark.browser


def even_and_one(tokens: int = 9) -> regard.Recording:
    """Layer 0: a head that looks at itself, one that looks everywhere; layer 1: the other way."""
    itself, even = torch.eye(tokens), torch.full((tokens, tokens), 1 / tokens)
    layers = {"a": torch.stack((itself, even)), "b": torch.stack((even, itself))}
    return regard.Recording(
        {name: regard.AttentionMatrix.from_weights(w) for name, w in layers.items()}
    )


def labels(page: Page) -> list[str]:
    page.wait_for_selector("#view-overview button")
    found = page.eval_on_selector_all(
        "#view-overview button", "all => all.map((one) => one.getAttribute('aria-label'))"
    )
    return [label.replace("\u202f", " ") for label in found]


def heads(page: Page) -> list[str]:
    return [label.split(",")[0] for label in labels(page)]


def test_heads_are_named_with_their_kinds_sorted_and_opened(show: Open) -> None:
    page = show(even_and_one(), "#view=overview")
    with step("every head has its kind"):
        first, second, *_ = labels(page)
        assert first.startswith("layer 0 head 0, self, score 100 %, entropy 0 %")
        assert second.startswith(
            "layer 0 head 1, uniform, score 100 %, entropy 100 %, sinks 11.1 %"
        )
    with step("the menu sorts the heads and changes the address"):
        assert page.inner_text("#view-overview .count") == "4 heads"
        page.select_option("#view-overview .filters select", "kind")
        assert pages.address(page, lambda said: "sort" in said)["sort"] == "kind"
        page.wait_for_selector("#view-overview .row:only-child")
        order = [(0, 0), (1, 1), (0, 1), (1, 0)]
        assert heads(page) == [f"layer {layer} head {head}" for layer, head in order]
    with step("a click opens the map of a head"):
        visit(page, "#view=overview")
        page.wait_for_selector("#view-overview .row:nth-child(2)")
        page.click("#view-overview button >> nth=3")
        page.wait_for_selector('body[data-view="map"]')
        assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "1")
    with step("the arrows and Enter open one"):
        visit(page, "#view=overview&layer=0&head=0")
        page.wait_for_selector('body[data-view="overview"]')
        page.locator('#view-overview button[aria-pressed="true"]').focus()
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector('body[data-view="map"]')
        assert (page.input_value("#layer"), page.input_value("#head")) == ("1", "1")
    with step("beside the map the same maps are small again, and the arrows open them"):
        page.wait_for_selector("#overview .heads.beside button")
        box = page.locator("#overview .heads button").first.bounding_box()
        assert box is not None
        assert box["width"] <= 40
        page.locator('#overview .heads button[aria-pressed="true"]').focus()
        page.keyboard.press("ArrowUp")
        page.wait_for_selector('body[data-read^="0,1,"]')
        assert page.locator(":focus").get_attribute("aria-label").startswith("layer 0 head 1")


@pytest.mark.full
def test_many_heads_are_on_one_screen_and_their_kinds_are_not_cut(show: Open) -> None:
    with step("768 heads are on one screen of small maps"):
        matrix = regard.attend(torch.randn(32, 7, 4), torch.randn(32, 7, 4))
        page = show(regard.Recording({f"layer.{i}": matrix for i in range(24)}), "#view=overview")
        assert len(heads(page)) == 768
        box = page.locator("#view-overview button >> nth=31").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 1280
    sinks = torch.full((12, 9, 9), 0.1 / 9)
    sinks[:, :, 0] += 0.9
    recording = regard.Recording({"a": regard.AttentionMatrix.from_weights(sinks)})
    page = show(recording, "#view=overview")
    for width in (390, 850, 1280):
        with step(f"each head stands right of its layer with its kind, {width} pixels"):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_selector("#view-overview .kind:not(:empty)")
            cut = page.eval_on_selector_all(
                "#view-overview .kind",
                "all => all.filter((one) => one.scrollWidth > one.clientWidth"
                " || one.scrollHeight > one.clientHeight + 1)"
                ".map((one) => one.innerText)",
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
            assert kind.inner_text() in labels(page)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [1, 6, 30])
def test_nine_heads_fill_a_large_screen(show: Open, layers: int) -> None:
    matrix = regard.attend(torch.randn(9, 7, 4), torch.randn(9, 7, 4))
    recording = regard.Recording({f"layer.{i}": matrix for i in range(layers)})
    page = show(recording, "#view=overview", viewport={"width": 2560, "height": 1440})
    assert heads(page)[9:10] == ["layer 1 head 0"][: layers - 1]
    ends = page.eval_on_selector_all(
        "#view-overview button", "all => all.map((one) => one.getBoundingClientRect().right)"
    )
    assert 0.9 * 2560 < max(ends) <= 2560
