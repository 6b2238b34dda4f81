"""What the page says of the recording, and of tokens that are hard to show."""

from pathlib import Path

import pytest

import pages
import regard
from pages import Open, recorded
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param(None, "9 tokens", id="one text"),
        pytest.param(23, "9 × 23 tokens", id="cross-attention"),
    ],
)
def test_the_bar_counts_the_tokens(keys: int | None, said: str, show: Open) -> None:
    page = show(recorded(keys=keys))
    assert page.inner_text("#about").split(" · ")[1] == said


HEBREW = "12מה שלומך"


def test_a_token_written_from_right_to_left_stays_apart_from_its_place(show: Open) -> None:
    seen = recorded(tokens=5)
    tokens = [regard.Token(HEBREW), *pages.words(4)]
    seen = regard.Recording(dict(seen), query_tokens=tokens)
    page = show(seen, "#view=steps&order=position&query=4")
    page.wait_for_selector("#view-steps [data-row]")
    token = page.locator("#view-steps tbody th bdi").first
    place = page.locator("#view-steps tbody th .position").first
    assert token.inner_text() == HEBREW
    before, after = token.bounding_box(), place.bounding_box()
    assert before
    assert after
    assert before["x"] + before["width"] <= after["x"]


def test_a_name_that_would_turn_the_line_is_shown_harmlessly(show: Open, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    seen = regard.Recording({"a\u202elayer": recorded()[0]}, model="\u202eledom")
    page = show(write_page(seen, path, title="\u202ekool"))
    assert page.inner_text("#title") == "‹RLO›kool"
    assert page.inner_text("#about").startswith("‹RLO›ledom · ")
    assert page.inner_text("#layer-name") == "a‹RLO›layer"
