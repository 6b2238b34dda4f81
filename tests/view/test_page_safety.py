"""The page is safe: hostile tokens stay text, and damage is told in one sentence."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

import pages
import regard
from pages import Open, go, ready, recorded, sentence
from regard.view.export.page_file import write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]


def damaged(tmp_path: Path, layer: int) -> Path:
    """Of two layers one is damaged."""
    path = write_page(recorded(), tmp_path / "page.html")
    text = path.read_text()
    at = text.index(f'id="layer-{layer}-query"') + 200
    path.write_text(text[:at] + ("A" if text[at] != "A" else "B") * 8 + text[at + 8 :])
    return path


TOLD = (
    "Layer {} of this file is damaged: its numbers are cut off or changed. Write the file again to "
    "see the whole."
)


def test_a_damaged_layer_leaves_the_others_whole(show: Open, tmp_path: Path) -> None:
    page = show(damaged(tmp_path, 0))
    page.wait_for_selector("#damage:not([hidden]):has-text('small map')")
    told = f"{TOLD.format(0)} The small map is shown instead."
    assert page.inner_text("#damage") == told
    go(page, 1, 0, 3, 2)
    assert not page.is_visible("#damage")
    assert "of its attention to" in sentence(page)


def test_the_damaged_layer_is_named_whichever_is_open(show: Open, tmp_path: Path) -> None:
    for address in (
        "compare=beside&with=1.1",
        "compare=difference&with=1.1",
        "heads=0.0_1.1",
        "heads=0.0_1.1&view=text",
        "heads=0.0_1.1&view=segments",
    ):
        page = show(damaged(tmp_path, 1), f"#layer=0&head=0&query=3&key=2&{address}")
        page.wait_for_selector("#damage:not([hidden])")
        assert page.inner_text("#damage").startswith(TOLD.format(1)), address


def test_a_damaged_head_beside_leaves_the_open_one_whole(show: Open, tmp_path: Path) -> None:
    page = show(damaged(tmp_path, 1), "#layer=0&head=0&query=3&key=2&compare=beside&with=1.1")
    page.wait_for_selector(".pane:nth-child(2) .map[data-ready=damaged]")
    page.wait_for_selector('.pane:nth-child(1) .map[data-ready^="0 0 "]')
    assert "of its attention to" in sentence(page)
    page.click("button[data-set='compare=alone']")
    page.wait_for_selector("#damage", state="hidden")


def test_numbers_saved_of_a_damaged_layer_say_that_they_are_missing(
    show: Open, tmp_path: Path
) -> None:
    page = show(damaged(tmp_path, 0))
    page.wait_for_selector("#damage:not([hidden]):has-text('small map')")
    page.click("#save summary")
    with page.expect_download() as download:
        page.click("[data-save=csv]")
    assert TOLD.format(0) in Path(download.value.path()).read_text().splitlines()[0]


WORDS_OF_A_PART = (
    "This page is still being read. If it stays so, the file is not whole: copy it again."
)


@pytest.mark.parametrize(
    ("part", "motion"), [(0.5, "reduce"), (0.97, "no-preference")], ids=["in the data", "in code"]
)
def test_a_file_that_is_cut_short_says_so(
    part: float, motion: str, browser: Browser, tmp_path: Path
) -> None:
    text = write_page(recorded(), tmp_path / "page.html").read_text()
    (tmp_path / "page.html").write_text(text[: int(part * len(text))])
    page = browser.new_page(reduced_motion=motion)
    page.goto(f"file://{tmp_path / 'page.html'}")
    page.wait_for_selector("#failure")
    assert page.inner_text("#failure") == WORDS_OF_A_PART
    late = page.eval_on_selector("#failure", "words => getComputedStyle(words).animationDuration")
    assert late == "0.3s"
    page.close()


def test_a_whole_file_says_nothing_of_being_read(browser: Browser, tmp_path: Path) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    page = browser.new_page(reduced_motion="reduce")
    page.add_init_script(
        """const look = () => {
          const words = document.getElementById("failure");
          if (words) window.wereSeen ||= words.checkVisibility({ visibilityProperty: true });
          requestAnimationFrame(look);
        };
        look();"""
    )
    page.goto(f"file://{path}")
    page.wait_for_selector("body.ready")
    assert page.inner_text("#failure") == ""
    assert not page.evaluate("window.wereSeen")
    page.close()


def test_without_scripts_only_that_is_said(browser: Browser, tmp_path: Path) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"file://{path}")
    page.wait_for_timeout(500)  # until words that wait would be seen
    assert page.is_visible("noscript p")
    assert not page.is_visible("#failure")
    page.close()


def test_a_copy_saved_from_an_open_page_says_what_it_lacks(
    show: Open, browser: Browser, tmp_path: Path
) -> None:
    address = "#layer=0&head=0&query=3&key=2&view=overview"
    page = show(recorded(), address)
    page.wait_for_selector("body[data-read='0,0,3,2,0']")
    buttons = page.locator("#view-overview button").count()
    (tmp_path / "copy.html").write_text(page.content())
    copy = browser.new_page()
    copy.goto(f"file://{tmp_path / 'copy.html'}{address}")
    copy.wait_for_selector("#damage:not([hidden])")
    assert copy.inner_text("#damage") == (
        "Layer 0 is not in this copy: a browser saved it from an open page. Open the file itself "
        "to see the whole."
    )
    assert copy.locator("#view-overview button").count() == buttons
    go(copy, 1, 0, 3, 2)
    assert not copy.is_visible("#damage")
    assert "of its attention to" in sentence(copy)
    copy.close()


def test_a_damaged_page_says_so(show: Open, tmp_path: Path) -> None:
    # recording.test.mjs has the kinds of damage.
    path = write_page(recorded(), tmp_path / "page.html")
    path.write_text(path.read_text().replace('"num_heads":2', '"num_heads":3'))
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
    assert page.inner_text('#prose [data-at="2"]') == "‹RLO›evil‹LRI›"
    assert page.inner_text('#prose [data-at="3"]') == "‹NUL›null"
    assert page.inner_text('#prose [data-at="6"]') == "‹U+D800›"
    # A very long one is shortened, and whole on demand.
    assert len(page.inner_text('#prose [data-at="4"]')) < 200
    go(page, 0, 0, 4, 0)
    page.click("#whole-token summary")
    assert page.inner_text("#whole-token pre").strip() == HOSTILE[4].strip()


def test_a_page_that_does_what_it_must_not_is_seen(browser: Browser, tmp_path: Path) -> None:
    for script, seen in (
        ("console.error('oh')", "console: oh"),
        ("alert(1)", "dialog"),
        ("fetch('http://localhost:9/').catch(() => 0)", "localhost"),
    ):
        with pytest.raises(AssertionError, match=seen), pages.opener(browser, tmp_path) as show:
            show(recorded(), script=script)
