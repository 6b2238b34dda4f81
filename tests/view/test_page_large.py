"""Layers too large for their file: what the page knows of them, and says it does not know."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from pages import (
    Open,
    address,
    answers_of,
    first_layer,
    go,
    place,
    pooled,
    ready,
    sentence,
    step,
    tile_of,
)
from regard.view.export.page_file import write_page

TOKENS = 600  # so that a block is 2 x 2 tokens
BOTH = 700_000  # block means of both layers fit, query and key of neither


def recorded(*, layers: int = 2, heads: int = 2, **options: Any) -> regard.Recording:
    torch.manual_seed(7)
    shape = (heads, TOKENS, 128)
    return regard.Recording(
        {
            f"layer.{layer}": regard.attend(torch.randn(shape), torch.randn(shape), **options)
            for layer in range(layers)
        }
    )


def asked(
    recording: regard.Recording, questions: list[dict[str, Any]], folder: Path, limit: int = BOTH
) -> list[dict[str, Any]]:
    """What the page's engine answers about the first layer, which has block means."""
    page = write_page(recording, folder / "page.html", limit=limit)
    layer, _ = first_layer(page)
    assert (layer["kind"], layer["block"]) == ("pyramid", 2)
    return answers_of(page, questions)


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-9)


# Its engine


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_tile_from_the_size_of_a_block_up_is_the_mean_of_blocks(
    level: int, tmp_path: Path
) -> None:
    recording = recorded(mask=regard.Causal())
    side = 256 * 2**level
    (answer,) = asked(recording, [place(level) | {"head": 1}], tmp_path)
    weights = recording[0][1].to_dense()[:side, :side]
    near(tile_of(answer), pooled(weights, level))
    assert answer["exact"]


def test_a_finer_tile_repeats_its_blocks(tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [place(0, 2, 1)], tmp_path)
    means = pooled(recording[0][0].to_dense(), 1)
    repeated = means.repeat_interleave(2, 0).repeat_interleave(2, 1)
    near(tile_of(answer), repeated[512:600, 256:512])


def test_a_row_is_the_means_of_its_blocks_where_it_may_attend(tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [{"kind": "row", "query": 400, "head": 1}], tmp_path)
    means = pooled(recording[0][1].to_dense(), 1)[200].repeat_interleave(2)
    near(torch.tensor(answer["values"]).double(), means * (torch.arange(TOKENS) <= 400))


def test_a_column_is_the_means_of_its_blocks_where_a_query_may_attend(tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [{"kind": "column", "key": 101}], tmp_path)
    means = pooled(recording[0][0].to_dense(), 1)[:, 50].repeat_interleave(2)
    near(torch.tensor(answer["values"]).double(), means * (torch.arange(TOKENS) >= 101))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["steps", "segments"])
def test_what_needs_every_weight_is_refused(kind: str, tmp_path: Path) -> None:
    (answer,) = asked(recorded(), [{"kind": kind, "query": 0}], tmp_path)
    assert answer["error"] == "not every weight of this layer is in this file."


# The page


@pytest.mark.browser
def test_a_block_has_one_number(show: Open, tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    block = 2 * int(recording[1][1, 400:402].to_dense().view(2, 300, 2).sum((0, 2)).argmax())
    page = show(write_page(recording, tmp_path / "large.html", limit=BOTH))
    go(page, 1, 1, 400, block)
    rows = page.locator("#looks-table tr").all_inner_texts()
    texts = [" ".join(row.replace("\u202f", " ").split()) for row in rows]
    assert len(set(texts)) == len(texts)
    place, _, share = texts[0].rpartition(f"{block + 1} ")
    assert place == f"{block} to "
    assert f"about {share} of the attention goes to tokens {block} to" in sentence(page)
    assert "means" not in page.inner_text("#text")  # the sentence says so, once
    assert page.inner_text("#value") == ""
    go(page, 1, 1, 400, 400, view="text")  # this view is of one token
    page.wait_for_selector("#view-text [data-share]")
    numbered = page.locator("#view-text .side >> nth=0").locator("[data-share]").all()
    assert {int(one.get_attribute("data-at") or 1) % 2 for one in numbered} == {0}


@pytest.mark.full
@pytest.mark.browser
def test_sinks_that_are_in_the_means_cannot_be_hidden_and_the_control_says_so(
    show: Open, tmp_path: Path
) -> None:
    path = write_page(recorded(mask=regard.Causal()), tmp_path / "large.html", limit=BOTH)
    page = show(path, "#layer=1&head=1&query=400&key=0&hidden=1")
    page.wait_for_selector('body[data-read="1,1,400,0,0"]')
    said = "These block means contain them, so they cannot be hidden."
    assert page.inner_text("#sinks") == said
    assert page.is_disabled("#sinks")
    page.keyboard.press("s")
    page.keyboard.press("t")
    assert address(page, lambda said: "folded" in said)["key"] == "0"


@pytest.mark.browser
@pytest.mark.full
def test_the_page_says_what_is_quantised_what_is_missing_and_how_to_get_it(
    show: Open, tmp_path: Path
) -> None:
    recording = recorded(mask=regard.Causal())
    page = show(write_page(recording, tmp_path / "large.html", limit=BOTH))
    page.evaluate("location.hash = 'layer=1&head=1&query=400&key=301&hidden=1'")
    page.wait_for_selector('body[data-read="1,1,400,301,0"]')  # sinks are in the means
    ready(page)
    notes = page.inner_text("#notes").replace("\u202f", " ")
    assert "it has means of blocks of 2 × 2 tokens, ± " in notes
    assert "regard serve, or write the file with --layers 1 or a larger --limit" in notes
    assert page.inner_text("body").count("±") == 1
    said, _, rest = sentence(page).partition("about ")
    assert said == "Of tokens 400 to 401, "
    mean = float(recording[1][1, 400:402, 300:302].mean())
    assert float(rest.split()[0]) / 100 == pytest.approx(2 * mean, rel=0.05)
    assert "goes to tokens 300 to 301 (means of blocks of 2 × 2 tokens), " in rest
    go(page, 1, 1, 400, 401)
    assert sentence(page) == "“400” may not attend to “401”, layer 1 head 1."
    go(page, 1, 1, 400, 300, zoom="20", row="390", column="290")
    page.set_viewport_size({"width": 1440, "height": 900})
    legend, name = page.locator("#legend").bounding_box(), page.locator("#layer").bounding_box()
    assert legend
    assert name
    assert legend["x"] > name["x"] + name["width"]  # beside the name, not under it
    for view in ("steps", "segments"):
        go(page, 1, 1, 400, 300, view=view)
        said = page.locator(f"#view-{view} .note, #view-{view} .line").first.inner_text()
        assert said.startswith("Only block means of this layer are in this file")
        assert "or write the file with --layers 1 or a larger --limit" in said
    # A block is 2 x 2 tokens here too.
    query, key = torch.randn(2, 2, 600, 128, generator=torch.Generator().manual_seed(7))
    query[0, 400, 5] = torch.nan
    matrix = regard.attend(query, key, mask=regard.Causal())
    recording = regard.Recording({"layer": matrix})
    path = write_page(recording, tmp_path / "nan.html", limit=500_000)
    page = show(path, "#view=text&layer=0&head=0&query=400")
    with step("the text at a word that is not numbers"):
        page.wait_for_selector("#sentence:has-text('400')")
        assert sentence(page).startswith("“400”: its weights are not numbers (NaN)")
        assert page.locator("#view-text .caption").all_inner_texts()[0] == "Not numbers (NaN)"
    with step("the line below, at a mean that is not a number and at one that is"):
        go(page, 0, 0, 401, 17)
        assert sentence(page).startswith(
            "“401”: its weights are not numbers (NaN) (means of blocks of 2 × 2 tokens), "
        )
        assert page.inner_text("#looks-table tbody").strip() == "not numbers (NaN)"
        go(page, 0, 0, 403, 17)
        assert sentence(page).startswith("Of tokens 402 to 403, about ")
