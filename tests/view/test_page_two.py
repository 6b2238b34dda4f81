"""A page of two recordings: the same head of both side by side, and their difference."""

from pathlib import Path

import pytest
import torch

import regard
from pages import Open, go, step
from regard.view.export.page_file import write_page

pytestmark = pytest.mark.browser


def recording(words: str, seed: int) -> regard.Recording:
    tokens = words.split()
    generator = torch.Generator().manual_seed(seed)
    layers = {
        str(layer): regard.attend(
            *torch.randn(2, 3, len(tokens), 8, generator=generator), mask=regard.Causal()
        )
        for layer in range(2)
    }
    return regard.Recording(layers, query_tokens=[f"{word} " for word in tokens])


ONE = recording("Life is short eat dessert first", 1)
TWO = recording("Life is long have some patience", 2)
LONGER = recording("Life is long so have patience with every dessert", 3)


def both(folder: Path, other: regard.Recording) -> Path:
    path = folder / "page.html"
    return write_page(ONE, path, title="short", other=other, other_title="long")


def test_two_recordings_stand_side_by_side_with_their_difference(
    show: Open, tmp_path: Path
) -> None:
    page = show(both(tmp_path, TWO), "#layer=1&head=2")
    with step("the maps stand side by side, each with its own words"):
        page.wait_for_selector('body[data-compare="beside"]')
        titles = page.locator(".map-title").all_inner_texts()
        assert titles == ["Layer 1 head 2 (short)", "Layer 1 head 2 (long)"]
        note = "Each map stands beside that of the same head in “long”."
        assert note in page.inner_text("#notes")
        assert page.locator("#layer option").all_inner_texts() == ["0", "1"]
        go(page, 1, 1, 5, 4)
        assert page.locator(".map-title").all_inner_texts()[1] == "Layer 1 head 1 (long)"
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        layer, head, query = (int(torch.randint(n, (), generator=generator)) for n in (2, 3, 6))
        key = int(torch.randint(query + 1, (), generator=generator))
        with step(f"the difference of layer {layer} head {head} at {query}, {key}"):
            go(page, layer, head, query, key, compare="difference")
            exact = float(ONE[layer][head, query, key] - TWO[layer][head, query, key])
            value = page.inner_text("#value").removeprefix("difference ").replace("−", "-")
            assert float(value.split()[0]) == pytest.approx(exact, rel=1e-3, abs=1e-6)
    with step("texts of other lengths have no difference and the page says why"):
        page = show(both(tmp_path, LONGER), "#layer=0&head=0&compare=difference")
        page.wait_for_selector('body[data-compare="beside"]')
        note = "They have 6 tokens and 9 tokens, so their cells have no difference"
        assert note in page.inner_text("#notes")
        assert page.is_disabled("button[data-set='compare=difference']")
        for compare in ("alone", "beside"):
            page.keyboard.press("c")
            page.wait_for_selector(f'body[data-compare="{compare}"]')
        page.wait_for_selector(".pane:nth-child(2) .map[data-ready]:not([data-ready=''])")
        box = page.locator(".pane:nth-child(2) .map").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] - 20)
        page.mouse.move(box["x"] + 100, box["y"] + 100)
