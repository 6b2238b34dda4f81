"""The page is safe: hostile tokens stay text, and damage is told in one sentence."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

import pages
import regard
from pages import Open, go, ready, recorded, sentence
from regard.see.file import write_page

pytestmark = pytest.mark.browser


def test_a_damaged_layer_leaves_the_others_whole(show: Open, tmp_path: Path) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    text = path.read_text()
    at = text.index('id="layer-0-query"') + 200
    path.write_text(text[:at] + ("A" if text[at] != "A" else "B") * 8 + text[at + 8 :])
    page = show(path)
    page.wait_for_selector("#damage:not([hidden])")
    assert page.inner_text("#damage").startswith("Layer 0 of this file is damaged: its numbers are")
    go(page, 1, 0, 3, 2)
    assert not page.is_visible("#damage")
    assert "of its attention to" in sentence(page)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"version":1', '"version":2', id="another version"),
        pytest.param('"version":1', '"version":', id="no JSON"),
        pytest.param('"num_heads":2', '"num_heads":0', id="a shape"),
        pytest.param('"num_heads":2', '"num_heads":3', id="a small map"),
    ],
)
def test_a_damaged_page_says_so(old: str, new: str, show: Open, tmp_path: Path) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    path.write_text(path.read_text().replace(old, new))
    page = show(path)
    assert page.inner_text("#failure").startswith("This file is damaged: ")
    assert not page.is_visible("#stage")


# Tokens are hostile text

HOSTILE = [
    "<script>document.title = 'pwned'</script>",
    " </style></script><img src=x onerror=\"document.title='pwned'\">",
    " \u202eevil\u2066",
    "\x00null",
    " " + "long" * 2500,
    " {{code}}",
    "\ud800",
    "\n",
    " --><!--",
    " javascript:alert(1)",
]


def hostile() -> regard.Recording:
    recording = recorded(tokens=len(HOSTILE), heads=2)
    tokens = [regard.Token(text) for text in HOSTILE]
    layers = {"<img src=x onerror=alert(1)>": recording[0], "b": recording[1]}
    return regard.Recording(layers, model="<script>alert(2)</script>", query_tokens=tokens)


def test_hostile_tokens_are_shown_and_nothing_runs(show: Open) -> None:
    page = show(hostile())
    ready(page)
    for at in range(len(HOSTILE)):
        go(page, 0, 0, at, at)
    assert "pwned" not in page.title()
    assert page.locator("#prose img, #prose script, #prose style").count() == 0
    assert page.inner_text('#prose [data-at="0"]') == HOSTILE[0]


def test_hidden_characters_are_drawn_as_symbols(show: Open) -> None:
    page = show(hostile())
    assert page.inner_text('#prose [data-at="2"]') == "‹RLO›evil‹LRI›"
    assert page.inner_text('#prose [data-at="3"]') == "‹NUL›null"
    assert page.inner_text('#prose [data-at="6"]') == "‹U+D800›"


def test_a_very_long_token_is_shortened_and_whole_on_demand(show: Open) -> None:
    page = show(hostile())
    assert len(page.inner_text('#prose [data-at="4"]')) < 200
    go(page, 0, 0, 4, 0)
    page.click("#whole-token summary")
    assert page.inner_text("#whole-token pre").strip() == HOSTILE[4].strip()


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        pytest.param("console.error('oh')", "console: oh", id="console"),
        pytest.param("alert(1)", "dialog", id="dialog"),
        pytest.param("fetch('http://localhost:9/').catch(() => 0)", "localhost", id="request"),
        pytest.param("setTimeout(() => { throw Error('oh') })", "error: oh", id="error"),
    ],
)
def test_a_page_that_does_what_it_must_not_is_seen(
    script: str, seen: str, browser: Browser, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=seen), pages.opener(browser, tmp_path) as show:
        show(recorded(), script=script)
