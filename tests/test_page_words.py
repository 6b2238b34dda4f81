"""What the page says of the recording, and of tokens that are hard to show."""

import pytest

import pages
import regard
from pages import Open, recorded

pytestmark = pytest.mark.browser


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
INVISIBLE = "\u00ad\u180e\u3164\u2800\u115f\u034f\ufe0f"


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


@pytest.mark.parametrize("character", list(INVISIBLE), ids=lambda one: f"U+{ord(one):04X}")
def test_a_token_of_an_invisible_character_shows_its_number(character: str, show: Open) -> None:
    seen = recorded(tokens=5)
    tokens = [regard.Token(character), *pages.words(4)]
    seen = regard.Recording(dict(seen), query_tokens=tokens)
    page = show(seen, "#view=steps&order=position&query=4")
    page.wait_for_selector("#view-steps [data-row]")
    shown = page.locator("#view-steps tbody th").first.inner_text()
    assert shown.startswith(f"‹U+{ord(character):04X}›")
