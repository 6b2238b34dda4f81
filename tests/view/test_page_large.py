"""Layers too large for their file: what the page knows of them, and says it does not know."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from pages import (
    Open,
    answers_of,
    first_layer,
    go,
    place,
    pooled,
    ready,
    sentence,
    three_digits,
    tile_of,
)
from regard.view.export import page_file
from regard.view.export.page_file import write_page

TOKENS = 600  # so that a block is 2 x 2 tokens
BOTH = 700_000  # block means and strongest keys of both layers fit, query and key of neither


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


def test_by_row_each_row_of_blocks_is_over_its_highest(tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [place(1) | {"by_row": True}], tmp_path)
    means = pooled(recording[0][0].to_dense(), 1)
    torch.testing.assert_close(
        tile_of(answer), (means / means.amax(-1, keepdim=True))[:256, :256], rtol=0.1, atol=1e-6
    )


@pytest.mark.parametrize("query", [0, 5, 7, 8, 599])
def test_a_row_has_its_8_strongest_keys_exactly_and_the_others_as_a_sum(
    query: int, tmp_path: Path
) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [{"kind": "row", "query": query, "head": 1}], tmp_path)
    values, keys = (of_all[1, query] for of_all in recording[0].topk(8))
    expected = torch.zeros(TOKENS).scatter_add(0, keys.clamp(min=0), values)
    # One row and the whole matrix are computed by different backends.
    torch.testing.assert_close(torch.tensor(answer["values"]).float(), expected, rtol=1e-5, atol=0)
    assert answer["rest"]["share"] == pytest.approx(1 - float(values.sum()), abs=1e-5)
    assert answer["rest"]["most"] == pytest.approx(float(values[-1]) if query > 7 else 0, rel=1e-5)


def test_of_rows_that_are_less_than_1_the_others_are_what_is_left(tmp_path: Path) -> None:
    recording = recorded(sink_bias=torch.tensor([2.0, 9.0]))
    (answer,) = asked(recording, [{"kind": "row", "query": 300, "head": 1}], tmp_path)
    row = recording[0][1, 300]
    others = row.sum() - row.topk(8).values.sum()
    assert float(row.sum()) < 0.9
    assert answer["rest"]["share"] == pytest.approx(float(others), rel=1e-3)


def test_a_column_is_the_means_of_its_blocks(tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    (answer,) = asked(recording, [{"kind": "column", "key": 101}], tmp_path)
    means = pooled(recording[0][0].to_dense(), 1)[:, 50].repeat_interleave(2)
    near(torch.tensor(answer["values"]).double(), means)


@pytest.mark.parametrize("kind", ["steps", "segments"])
def test_what_needs_every_weight_is_refused(kind: str, tmp_path: Path) -> None:
    (answer,) = asked(recorded(), [{"kind": kind, "query": 0}], tmp_path)
    assert answer["damage"] == "not every weight of this layer is in this file."


# The page


@pytest.mark.browser
@pytest.mark.full
def test_a_strong_key_has_its_rank_among_those_held_and_what_the_others_share(
    show: Open, tmp_path: Path
) -> None:
    recording = recorded(mask=regard.Causal())
    page = show(write_page(recording, tmp_path / "large.html", limit=BOTH))
    row = recording[1][1, 400]
    top = row.topk(9)
    key = int(top.indices[2])
    go(page, 1, 1, 400, key)
    others = three_digits(float(1 - top.values[:8].sum()))
    assert sentence(page) == (
        f"“400” gives {three_digits(float(top.values[2]))} of its attention to “{key}” "
        f"(rank 3 of the 8 that this file holds; the other 393 keys share {others}), "
        "layer 1 head 1."
    )
    shown = float(page.inner_text("#value").removeprefix("weight "))
    assert shown == pytest.approx(float(top.values[2]), rel=1e-6)
    weak = int(top.indices[8])
    go(page, 1, 1, 400, weak)
    assert sentence(page) == (
        f"“400” gives “{weak}” at most {three_digits(float(top.values[7]))} of its attention: "
        "it is none of the 8 keys that this file holds of the query, layer 1 head 1."
    )
    go(page, 1, 1, 400, 401)
    assert sentence(page) == "“400” may not attend to “401”, layer 1 head 1."


@pytest.mark.browser
@pytest.mark.full
def test_the_page_says_what_is_quantised_what_is_missing_and_how_to_get_it(
    show: Open, tmp_path: Path
) -> None:
    page = show(write_page(recorded(), tmp_path / "large.html", limit=BOTH))
    go(page, 1, 1, 400, 300)
    ready(page)
    notes = page.inner_text("#notes").replace("\u202f", " ")
    assert "it holds means of blocks of 2 × 2 tokens, ± " in notes
    assert "the 8 strongest keys with their exact weights" in notes
    assert "regard serve, or write the file with layers=[1] or a larger limit" in notes
    assert "means of blocks of 2 × 2 tokens" in page.inner_text("#looked-table caption")
    go(page, 1, 1, 400, 300, zoom="20", row="390", column="290")
    page.wait_for_selector('#legend .unit:text("not finer in this file")')


@pytest.mark.browser
@pytest.mark.full
@pytest.mark.parametrize("view", ["steps", "segments"])
def test_a_view_that_needs_every_weight_says_in_one_sentence_how_to_get_it(
    view: str, show: Open, tmp_path: Path
) -> None:
    path = write_page(recorded(), tmp_path / "large.html", limit=BOTH)
    page = show(path, f"#view={view}&layer=1&query=400")
    said = page.locator(f"#view-{view} .note, #view-{view} .line").first.inner_text()
    assert said.startswith("Only block means and the strongest keys of this layer are in this file")
    assert said.endswith(
        "see it with regard serve, or write the file with layers=[1] or a larger limit."
    )


@pytest.mark.browser
@pytest.mark.full
def test_without_strongest_keys_a_cell_is_told_as_a_mean_of_its_block(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: object) -> int:
        return 2 * BOTH

    monkeypatch.setattr(page_file, "least_bytes_of_rows", no_room)
    recording = recorded()
    page = show(write_page(recording, tmp_path / "large.html", limit=BOTH))
    go(page, 1, 1, 400, 301)
    said, _, rest = sentence(page).partition("about ")
    assert said == "Of tokens 400 to 401, "
    mean = float(recording[1][1, 400:402, 300:302].mean())
    assert float(rest.split()[0]) / 100 == pytest.approx(2 * mean, rel=0.05)
    assert "goes to tokens 300 to 301 (means of blocks of 2 × 2 tokens, ± " in rest
    assert "Of single rows it holds nothing." in page.inner_text("#notes")


@pytest.mark.browser
@pytest.mark.full
def test_a_mean_over_heads_says_how_far_it_may_be_off(show: Open, tmp_path: Path) -> None:
    recording = recorded(mask=regard.Causal())
    page = show(write_page(recording, tmp_path / "large.html", limit=BOTH))
    go(page, 1, 1, 400, 10, heads="mean")
    page.wait_for_selector('#sentence:text("off by at most")')
    off = sum(float(recording[1][head, 400].topk(8).values[-1]) for head in (0, 1)) / 2
    assert f"off by at most {off * 100:.3g} percentage points" in sentence(page)


@pytest.mark.browser
@pytest.mark.full
def test_sinks_are_not_set_aside_where_they_are_in_the_means(show: Open, tmp_path: Path) -> None:
    page = show(write_page(recorded(), tmp_path / "large.html", limit=BOTH))
    page.evaluate("location.hash = 'layer=1&head=1&query=400&key=300&hidden=1'")
    page.wait_for_selector('body[data-read="1,1,400,300,0"]')
    assert "Sinks cannot be set aside here" in page.inner_text("#notes")
