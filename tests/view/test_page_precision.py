"""Pages whose numbers have fewer bits show the library's cells, and say how far off they are."""

import pytest

from pages import Open, go, recorded, sentence, three_digits
from regard.view.export import page_file

pytestmark = [pytest.mark.browser, pytest.mark.full]


def test_cells_of_24_bits_equal_the_library(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "FULL_PRECISION", 10)
    recording = recorded()
    page = show(recording)
    for query, key in [(0, 0), (3, 5), (8, 8)]:
        go(page, 1, 1, query, key)
        weight = float(recording[1][0, 1, query, key])
        assert f"gives {three_digits(weight)} of its attention to" in sentence(page)
    assert "stored in 24 bits" in page.inner_text("#notes")


def test_cells_of_16_bits_are_as_close_as_the_page_says(
    show: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_file, "FULL_PRECISION", 10)
    monkeypatch.setattr(page_file, "NEARLY_FULL_PRECISION", 10)
    recording = recorded()
    page = show(recording)
    go(page, 1, 1, 3, 5)
    shown = float(page.inner_text("#value").removeprefix("weight "))
    assert shown == pytest.approx(float(recording[1][0, 1, 3, 5]), abs=0.003)
    assert "stored in 16 bits" in page.inner_text("#notes")
