"""Weights that are not numbers: the page says so, and never shows them as 0."""

import pytest
import torch
from playwright.sync_api import Page, expect

import pages
import regard
from pages import Open, go, level_at, ready, sentence, step, visit

pytestmark = pytest.mark.browser

GREY = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const rows = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === 150 && data[i + 1] === 150 && data[i + 2] === 150)
      rows.add(Math.floor(i / 4 / canvas.width));
  return [...rows];
}"""


def spoilt(**options: object) -> regard.Recording:
    """One query of the first head has a NaN."""
    query, key = torch.randn(2, 1, 2, 9, 8).unbind(0)
    query[0, 0, 3, 2] = torch.nan
    matrix = regard.attend(query, key, **options)
    return regard.Recording({"layer": matrix}, query_tokens=pages.words(9))


def looks(page: Page) -> str:
    return page.inner_text("#looks-table tbody").strip()


@pytest.mark.full
def test_what_is_not_a_number_says_so_in_every_view(show: Open) -> None:
    """Of a layer that sees all keys, and of a causal one."""
    layers = {"plain": spoilt()[0], "causal": spoilt(mask=regard.Causal())[0]}
    recording = regard.Recording(layers, query_tokens=pages.words(9))
    page = show(recording)
    for layer, name in enumerate(layers):
        with step(name):
            check_views(page, recording, layer)


def check_views(page: Page, recording: regard.Recording, layer: int) -> None:
    with step("the map has a colour of its own"):
        visit(page, f"#layer={layer}&head=0&query=0&key=0")
        page.wait_for_selector(f'body[data-read="{layer},0,0,0,0"]')
        ready(page)
        assert level_at(page, 2, 1) >= 0
        assert level_at(page, 3, 1) == -1
    with step("the line below"):
        go(page, layer, 0, 3, 1)
        assert sentence(page) == (
            f"“short”: its weights are not numbers (NaN), layer {layer} head 0."
        )
        assert looks(page) == "not numbers (NaN)"
    with step("the text at that word"):
        visit(page, f"#view=text&layer={layer}&head=0&query=3")
        captions = page.locator("#view-text .side .caption")
        expect(captions.first).to_have_text("Not numbers (NaN)")
        assert sentence(page).startswith("“short”: its weights are not numbers (NaN)")
    with step("the text at another word: that one is grey, and has lines that are unknown"):
        visit(page, f"#view=text&layer={layer}&head=0&query=0")
        page.wait_for_selector(f'body[data-read="{layer},0,0,0,0"]')
        expect(captions.nth(1)).to_contain_text("; grey: not numbers (NaN)")
        colour = "span => getComputedStyle(span).backgroundColor"
        grey = page.eval_on_selector('#view-text .side:nth-child(2) [data-at="3"]', colour)
        assert grey == "rgb(150, 150, 150)"
        unknown = int(recording[layer].to_dense()[0, 0].isnan().sum())
        expect(page.locator("#view-text .lines .caption")).to_contain_text(
            f"{unknown} weights not numbers (NaN)"
        )
        best = recording[layer].to_dense()[0, 0, :, 0].nan_to_num(0).argmax()
        strongest = page.inner_text("#looked-table tbody button >> nth=0")
        assert strongest == ("[CLS]", *pages.WORDS)[best]
    with step("shares of parts"):
        visit(page, f"#view=segments&layer={layer}&head=0")
        expect(page.locator("#view-segments .line")).to_contain_text(f"layer {layer} head 0.")
        assert "NaN" in page.inner_text("#view-segments table")
    with step("a small map"):
        visit(page, "#view=overview")
        page.wait_for_selector("#view-overview button canvas")
        maps = page.locator("#view-overview .row").nth(layer).locator("canvas")
        spoilt_one, other = maps.all()
        rows, height = spoilt_one.evaluate(GREY), spoilt_one.evaluate("canvas => canvas.height")
        assert {int(9 * row / height) for row in rows} == {3}
        assert other.evaluate(GREY) == []


def check_kinds(page: Page, right: regard.AttentionMatrix) -> None:
    page.wait_for_selector("#view-overview .row:nth-child(2) .kind:not(:empty)")
    buttons = page.locator("#view-overview .row:nth-child(2) button")
    kinds = tuple(buttons.locator(".kind").all_inner_texts())
    assert kinds == regard.heads(regard.Recording({"right": right}))["kind"]
    wrong = page.locator("#view-overview .row:nth-child(1) button").first
    assert wrong.get_attribute("aria-label") == "layer 0 head 0, no kind: not numbers (NaN)"
    assert page.inner_text("#notes") == (
        "The kinds of its heads are not known: some weights of this layer are not numbers (NaN)."
    )


@pytest.mark.full
def test_a_layer_that_is_not_numbers_leaves_the_others_their_kinds(
    show: Open, serve: pages.Serve
) -> None:
    layers = {"wrong": spoilt()[0], "right": pages.recorded()[0]}
    recording = regard.Recording(layers, query_tokens=pages.words(9))
    with step("in a file"):
        check_kinds(show(recording, "#view=overview&layer=0"), recording[1])
    with step("from a server"):
        page, _ = serve(recording, "#view=overview&layer=0")
        check_kinds(page, recording[1])
    with step("where no layer has kinds the maps are shown in layers"):
        weights = regard.AttentionMatrix.from_weights(torch.full((1, 2, 5, 5), torch.nan))
        page = show(regard.Recording({"layer": weights}), "#view=overview")
        names = page.locator("#view-overview button")
        expect(names).to_have_count(2)
        assert (names.first.get_attribute("aria-label") or "").startswith("layer 0 head 0")
        assert page.is_hidden("#view-overview .filters")
