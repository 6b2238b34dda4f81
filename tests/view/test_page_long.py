"""A file with 65,536 tokens: any cell is the library's, at once."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page

import regard
from pages import Open, go, ready, step
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]

TOKENS = 65_536


@pytest.fixture(scope="module")
def matrix() -> regard.AttentionMatrix:
    """Of so few numbers that query and key are in float32: three digits of a weight are right."""
    query, key = torch.randn(2, 1, TOKENS, 4, generator=torch.Generator().manual_seed(0)) * 1.5
    return regard.attend(query, key, mask=regard.Causal())


@pytest.fixture(scope="module")
def path(matrix: regard.AttentionMatrix, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recording = regard.Recording({"layer": matrix})
    return write_page(recording, tmp_path_factory.mktemp("long") / "page.html", heads=[])


def cells(count: int) -> list[tuple[int, int]]:
    """Random places that the mask allows."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(TOKENS, (count, 2), generator=generator).tolist()
    return [(max(pair), min(pair)) for pair in pairs]


def shown(page: Page) -> float:
    """The weight that is read, of four digits."""
    return float(page.inner_text("#value").removeprefix("weight "))


def level_shown(page: Page) -> int:
    ready(page)
    return int((page.get_attribute(".map", "data-ready") or "").split(",")[-5:][0])


def test_cells_anywhere_are_the_librarys_and_nothing_is_a_sample(
    path: Path, matrix: regard.AttentionMatrix, show: Open
) -> None:
    page = show(path, "#query=50003&key=49999")
    with step("the whole is no sample"):
        assert level_shown(page) > 6
        assert not page.inner_text(".map .progress")
    for query, key in cells(12):
        with step(f"cell {query}, {key}"):
            go(page, 0, 0, query, key)
            assert shown(page) == pytest.approx(float(matrix[0, query, key]), rel=6e-4)
    for query, key in cells(4):
        with step(f"cell {query}, {key} without sinks is over what is left"):
            go(page, 0, 0, query, key, hidden="1")
            row = matrix[0, query].double()
            assert shown(page) == pytest.approx(float(row[key] / row[1:].sum()), rel=6e-4)
    with step("single cells are no sample"):
        page = show(path, "#query=50003&key=49999&zoom=4000&row=99990&column=99990")
        assert level_shown(page) == 0
        assert not page.inner_text(".map .progress")
