"""The map as a street map: tiles are the library's means, and one moves over them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from torch import Tensor

import regard
from cases import in_turn
from pages import (
    Open,
    address,
    answers_of,
    go,
    level_at,
    place,
    pooled,
    ready,
    recorded,
    sentence,
    step,
    three_digits,
    tile_of,
    visit,
)
from regard.view.export.page_file import write_page

NO_WORKER = """
window.Worker = class {
  constructor() { setTimeout(() => this.onerror?.(new Event("error")), 20); }
  postMessage() {}
};
"""

# Tiles are the library's means


def asked(
    recording: regard.Recording, questions: list[dict[str, Any]], folder: Path, **options: Any
) -> list[dict[str, Any]]:
    """What the engine of a written page answers about its first layer."""
    return answers_of(write_page(recording, folder / "page.html"), questions, **options)


MATRICES = {
    "plain": {},
    "causal": {"mask": regard.Causal()},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "window": {"mask": regard.SlidingWindow(2, 1)},
    "a mask with gaps": {"mask": torch.arange(81).reshape(9, 9) % 3 != 1},
    "cross-attention": {"tokens": 5, "keys": 13},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in MATRICES.items()])
def test_a_tile_is_the_mean_of_aligned_blocks(options: dict[str, Any], tmp_path: Path) -> None:
    recording = recorded(**options)
    levels = [0, 1, 2, 3]
    answers = asked(recording, [place(level) | {"head": 1} for level in levels], tmp_path)
    weights = recording[0][0, 1].to_dense()
    for level, answer in zip(levels, answers, strict=True):
        torch.testing.assert_close(tile_of(answer), pooled(weights, level), atol=1e-6, rtol=1e-5)
        assert answer["exact"]


def far(kind: str) -> tuple[regard.AttentionMatrix, Tensor]:
    """A head whose scores are far from 0, and its weights in float64."""
    query, key = torch.randn(2, 1, 9, 8, generator=torch.Generator().manual_seed(1))
    if kind == "bias":
        matrix = regard.attend(query, key, bias=torch.full((1, 9, 9), 1e4))
    elif kind == "lowest bias":
        lowest = torch.finfo(torch.float32).min
        matrix = regard.attend(query, key, bias=torch.full((1, 9, 9), lowest))
    else:
        query, key = torch.zeros_like(query), key * 0.002
        query[..., 0], key[..., 0] = 300.0, key[..., 0] + float(kind) / 300
        matrix = regard.attend(query, key, scale=1.0)
        return matrix, (query.double() @ key.double().mT).softmax(-1)[0]
    return matrix, matrix.to_dense().double()[0]


@in_turn(kind=["bias", "lowest bias", "3e4", "1e5", "-1e5"], hidden=[False, True])
def test_a_cell_has_one_weight_however_far_its_scores_are_from_0(
    kind: str, hidden: bool, tmp_path: Path
) -> None:
    matrix, weights = far(kind)
    if hidden:
        weights[:, 0] = 0
        weights /= weights.sum(-1, keepdim=True)
    questions = [
        place(0),
        *({"kind": kind, name: 4} for kind, name in (("row", "query"), ("column", "key"))),
    ]
    questions = [question | {"hidden": hidden} for question in questions]
    answers = asked(regard.Recording({"layer": matrix}), questions, tmp_path)
    found = [torch.tensor(answer["values"]).double() for answer in answers]
    expected = [weights.flatten(), weights[4], weights[:, 4]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


def test_tiles_lie_side_by_side(tmp_path: Path) -> None:
    recording = recorded(tokens=523, keys=601, mask=regard.Causal())
    questions = [place(0, 1, 0), place(0, 2, 2), place(1, 1, 1)]
    answers = asked(recording, questions, tmp_path)
    weights = recording[0][0, 0].to_dense().double()
    expected = [weights[256:512, :256], weights[512:, 512:], pooled(weights, 1)[256:, 256:]]
    for answer, part in zip(answers, expected, strict=True):
        torch.testing.assert_close(tile_of(answer), part, atol=1e-6, rtol=1e-5)


def test_without_sinks_rows_of_a_tile_are_renormalised(tmp_path: Path) -> None:
    recording = recorded()
    (answer,) = asked(recording, [place(0) | {"hidden": True}], tmp_path)
    weights = recording[0][0, 0].to_dense().clone()
    weights[:, 0] = 0
    expected = (weights / weights.sum(-1, keepdim=True)).double()
    torch.testing.assert_close(tile_of(answer), expected, atol=1e-6, rtol=1e-5)


def test_a_large_tile_is_a_sample_until_the_pass_is_through(tmp_path: Path) -> None:
    recording = recorded(tokens=37, mask=regard.Causal())
    question = place(2)
    until = {"kind": "progress", "until": 1}
    sample, progress, exact = asked(recording, [question, until, question], tmp_path, direct=100)
    weights = recording[0][0, 0].to_dense().double()
    middles = [start + (min(start + 4, 37) - start) // 2 for start in range(0, 37, 4)]
    torch.testing.assert_close(
        tile_of(sample), pooled(weights[middles].repeat_interleave(4, 0), 2), atol=1e-6, rtol=1e-5
    )
    assert (sample["exact"], sample["sampled"], exact["exact"]) == (False, 4, True)
    assert progress["seconds"] == 0
    torch.testing.assert_close(tile_of(exact), pooled(weights, 2), atol=1e-6, rtol=1e-5)


def test_tiles_of_a_pass_over_a_long_text_keep_its_edge(tmp_path: Path) -> None:
    recording = recorded(tokens=5, keys=4099)
    questions = [place(3, 0, 0), place(3, 0, 2)]
    until = {"kind": "progress", "until": 1}
    answers = asked(recording, [*questions, until, *questions], tmp_path, direct=100)[3:]
    means = pooled(recording[0][0, 0].to_dense(), 3)
    for answer, part in zip(answers, [means[:, :256], means[:, 512:]], strict=True):
        assert answer["exact"]
        torch.testing.assert_close(tile_of(answer), part, atol=1e-7, rtol=1e-4)


def test_a_column_of_a_long_text_waits_for_no_pass(tmp_path: Path) -> None:
    recording = recorded(tokens=37, mask=regard.Causal())
    questions = [{"kind": "column", "key": 5}, {"kind": "progress"}]
    answer, progress = asked(recording, questions, tmp_path, direct=1)
    expected = recording[0][0, 0].to_dense()[:, 5]
    torch.testing.assert_close(torch.tensor(answer["values"]), expected, atol=1e-6, rtol=1e-5)
    assert progress["done"] == 1


def long_text() -> regard.Recording:
    return recorded(tokens=70, keys=8300, mask=regard.SlidingWindow(8250, 0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [6, 7])
def test_of_a_long_text_coarse_tiles_are_in_the_file(level: int, tmp_path: Path) -> None:
    recording = long_text()
    (answer,) = asked(recording, [place(level) | {"head": 1}], tmp_path, direct=1)
    assert answer["exact"]
    torch.testing.assert_close(
        tile_of(answer),
        pooled(recording[0][0, 1].to_dense(), level),
        atol=1e-9,
        rtol=1e-4,  # query and key are in float32 here
    )


def test_of_a_long_text_what_the_file_does_not_hold_is_a_sample_first(tmp_path: Path) -> None:
    question = place(6) | {"hidden": True}
    until = {"kind": "progress", "until": 1, "hidden": True}
    recording = long_text()
    sample, _, exact = asked(recording, [question, until, question], tmp_path, direct=1)
    weights = recording[0][0, 0].to_dense().clone()
    weights[:, 0] = 0
    expected = pooled(weights / weights.sum(-1, keepdim=True), 6)
    assert (sample["exact"], exact["exact"]) == (False, True)
    torch.testing.assert_close(tile_of(exact), expected, atol=1e-9, rtol=1e-4)


def test_a_row_of_two_halves_is_two_halves_to_the_last_digit(tmp_path: Path) -> None:
    matrix = regard.attend(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
    recording = regard.Recording({"layer": matrix})
    steps = {"kind": "steps", "query": 1, "by": "position", "start": 0, "count": 2}
    row, one = asked(recording, [{"kind": "row", "query": 1}, steps], tmp_path)
    assert row["values"] == [0.5, 0.5]
    assert one["log_normalizer"] == pytest.approx(math.log(2), abs=1e-15)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in MATRICES.items()])
def test_a_cell_is_one_product_whatever_else_the_row_holds(
    options: dict[str, Any], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    recording = recorded(**options)
    ways = [{"hidden": hidden} for hidden in (False, True)]
    answers = asked(recording, [place(0) | {"head": 1} | way for way in ways], tmp_path)
    for way, answer in zip(ways, answers, strict=True):
        weights = recording[0][0, 1].to_dense().clone().double()
        if way["hidden"]:
            weights[:, 0] = 0
            weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
        with subtests.test(**way):
            torch.testing.assert_close(tile_of(answer), weights, atol=1e-6, rtol=1e-5)


# Moving over them


def frame_of(page: Page) -> tuple[float, float, float, float]:
    """Left, top, and a cell's width and height."""
    left, top, width, height = map(
        float, (page.get_attribute(".map", "data-frame") or "").split(",")
    )
    return left, top, width, height


def settled(page: Page) -> tuple[float, float, float, float]:
    """The frame once it no longer changes, with left and top from the corner of the window."""
    before = None
    while True:
        box = page.locator(".map").first.bounding_box()
        assert box is not None
        left, top, width, height = frame_of(page)
        now = (box["x"] + left, box["y"] + top, width, height)
        if now == before:
            return now
        before = now
        page.wait_for_timeout(100)


def shown(page: Page) -> list[int]:
    """Level, first row and column of cells, and how many rows and columns."""
    ready(page)
    return [int(n) for n in (page.get_attribute(".map", "data-ready") or "").split(",")[-5:]]


def then_dragging(page: Page) -> None:
    with step("dragging moves the map with the pointer"):
        visit(page, "#zoom=8&row=40&column=40&query=50&key=50")
        page.wait_for_selector('body[data-read="0,0,50,50,0"]')
        left, top, width, height = settled(page)
        start = (left + 200, top + 150)
        page.mouse.move(*start)
        page.mouse.down()
        page.mouse.move(start[0] - 2 * width, start[1] + 3 * height, steps=4)
        page.mouse.up()
        page.mouse.move(2, 2)
        # The address may follow between two of the steps.
        said = address(page, lambda said: float(said.get("row", "40")) < 37.5)
        assert (float(said["row"]), float(said["column"])) == pytest.approx((37, 42), abs=0.05)


@pytest.mark.full
@pytest.mark.browser
def test_the_map_moves_by_drag_wheel_and_double_click(show: Open) -> None:
    page = show(recorded(tokens=200), "#query=3&key=3")
    ready(page)
    token = (121.5, 83.5)
    for how, factor in (("wheel", 2), ("Control and wheel", 4), ("double click", 2)):
        with step(f"{how} zooms and keeps the token under the pointer"):
            visit(page, "#query=3&key=3")
            left, top, width, height = settled(page)
            at = (left + token[1] * width, top + token[0] * height)
            page.mouse.move(*at)
            if how == "double click":
                page.mouse.dblclick(*at)
            elif how == "wheel":
                page.mouse.wheel(0, -200)
            else:
                page.keyboard.down("Control")
                page.mouse.wheel(0, -400)
                page.keyboard.up("Control")
            page.mouse.move(2, 2)  # the address waits until nothing is pointed at
            said = address(page, lambda said: "zoom" in said)
            assert float(said["zoom"]) == pytest.approx(factor, rel=0.01)
            left, top, width, height = settled(page)
            x = left + (token[1] - float(said["column"])) * width
            y = top + (token[0] - float(said["row"])) * height
            assert (x, y) == pytest.approx(at, abs=2.5)  # the pointer is told in whole pixels
    then_dragging(page)


@pytest.mark.browser
@pytest.mark.full
def test_a_long_text_goes_from_aligned_blocks_to_single_cells(show: Open) -> None:
    recording = recorded(tokens=2048, heads=2, kv_heads=1, mask=regard.Causal())
    weights = recording[0][0, 1, 1500]
    key = int(weights.argmax())
    page = show(recording, f"#head=1&query=1500&key={key}")
    assert shown(page)[0] == 3
    page.keyboard.press("0")
    for _ in range(9):
        page.keyboard.press("+")
    drawn_from_80 = re.compile(r"^[^,]*,[^,]*,(?:[89]\d|\d{3,})(?:\.\d+)?(?:,|$)")
    expect(page.locator(".map").first).to_have_attribute("data-frame", drawn_from_80)
    level, row, column, rows, columns = shown(page)
    assert level == 0
    assert row <= 1500 < row + rows
    assert column <= key < column + columns
    assert f"gives {three_digits(float(weights[key]))} of its attention to" in sentence(page)
    value = float(page.inner_text("#value").removeprefix("weight "))
    assert value == pytest.approx(float(weights[key]), rel=5.1e-4)  # four digits
    with step("it opens without a worker"):
        page = show(recording, script=NO_WORKER)
        ready(page)
        go(page, 0, 1, 2000, 1000)
        weight = float(recording[0][0, 1, 2000, 1000])
        told = float(page.inner_text("#value").removeprefix("weight "))
        assert told == pytest.approx(weight, rel=5.1e-4)  # four digits
    with step("with more tokens than pixels the map shows aligned blocks"):
        tokens, pixels = 0, 400
        # So many tokens that a block of two by two has one pixel and no colours are mixed; how
        # large the map is depends on its labels, and so on the number of tokens.
        while tokens != 2 * pixels:
            tokens = 2 * pixels
            recording = recorded(tokens=tokens, mask=regard.Causal())
            page = show(recording, "#layer=0&head=1&scale=linear&query=0&key=1")
            ready(page)
            frame = (page.get_attribute(".map", "data-frame") or "").split(",")
            pixels = round(tokens * float(frame[2]))
        means = recording[0][0, 1].to_dense().unfold(0, 2, 2).unfold(1, 2, 2).mean((-2, -1))
        for row, column in [(5, 2), (9, 9), (30, 11), (len(means) - 3, 40)]:
            # A block of keys is shown with what it gets in all.
            expected = round(2 * float(means[row, column]) * 255)
            assert abs(level_at(page, 2 * row, 2 * column) - expected) <= 1
        assert "2 keys" in page.inner_text("#legend .unit")


# Several heads


def then_two_maps_side_by_side(page: Page) -> None:
    with step("two maps side by side, on one scale and with numbers in their cells"):
        visit(page, "#query=4&key=6&compare=beside&with=1.2")
        page.wait_for_selector('.pane:nth-child(2) .map[data-ready]:not([data-ready=""])')
        titles = page.locator(".map-title")
        expect(titles).to_have_text(["Layer 0 head 0", "Layer 1 head 2"])
        one, other = (page.locator(".map").nth(at).get_attribute("data-frame") for at in (0, 1))
        assert one == other
        assert float((one or "").split(",")[2]) >= 40  # pixels from which a cell has its number


@pytest.mark.full
@pytest.mark.browser
def test_several_heads_are_a_mean_a_difference_or_side_by_side(show: Open) -> None:
    recording = recorded(heads=3, kv_heads=3)
    cells = [(0, 1), (7, 2), (8, 8)]
    page = show(
        recording,
        "#layer=1&query=4&key=6&scale=linear",
        viewport={"width": 1440, "height": 900},
    )
    ready(page)
    with step("the mean of all heads of a layer"):
        page.keyboard.press("m")
        mean = recording[1][0].to_dense().mean(0)
        expect(page.locator("#sentence")).to_contain_text("mean")
        assert f"gives {three_digits(float(mean[4, 6]))} of its attention to" in sentence(page)
        assert sentence(page).endswith("mean of the 3 heads of layer 1.")
        ready(page)
        for query, key in cells:
            assert abs(level_at(page, query, key) - round(float(mean[query, key]) * 255)) <= 1
    with step("a difference, in percentage points"):
        visit(page, "#layer=1&head=1&query=4&key=6&compare=difference&with=0.2&scale=linear")
        expect(page.locator("#sentence")).to_contain_text("than in layer 0 head 2.")
        difference = recording[1][0, 1].to_dense() - recording[0][0, 2].to_dense()
        size = three_digits(abs(float(difference[4, 6]))).removesuffix(" %")
        much = "more" if difference[4, 6] > 0 else "less"
        points = f"{size} percentage points {much} of its attention in layer 1 head 1"
        assert points in sentence(page)
        expect(page.locator("#legend .unit")).to_contain_text("points more or less")
        ready(page)
        for query, key in cells:
            expected = 255 + round(float(difference[query, key]) * 255)
            assert abs(level_at(page, query, key) - expected) <= 1
    then_two_maps_side_by_side(page)
