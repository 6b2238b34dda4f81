"""The page is safe: hostile tokens stay text, and damage is told in one sentence."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import pages
import regard
from pages import Open, go, ready, recorded, sentence, step, table, visit
from regard.view.export.page_file import write_page

pytestmark = pytest.mark.browser


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


@pytest.mark.full
def test_a_damaged_layer_leaves_the_others_whole(show: Open, tmp_path: Path) -> None:
    page = show(damaged(tmp_path, 0))
    with step("it is told, and the small map is shown"):
        page.wait_for_selector("#damage:not([hidden]):has-text('small map')")
        told = f"{TOLD.format(0)} The small map is shown instead."
        assert page.inner_text("#damage") == told
    with step("numbers that are saved of it say that they are missing"):
        page.click("#save summary")
        with page.expect_download() as download:
            page.click("[data-save=csv]")
        assert TOLD.format(0) in Path(download.value.path()).read_text().splitlines()[0]
    with step("another layer"):
        go(page, 1, 0, 3, 2)
        assert not page.is_visible("#damage")
        assert "of its attention to" in sentence(page)


def then_saved_copies(page: Page, show: Open, browser: Browser, tmp_path: Path) -> None:
    with step("where nothing can be read no empty file is saved"):
        visit(page, "#layer=1&view=steps&query=5&key=5")
        page.wait_for_selector("#damage:not([hidden])")
        page.click("#save summary")
        page.click("[data-save=csv]")
        page.wait_for_selector("#saving:has-text('Nothing was saved: there are no numbers here.')")
    with step("a copy that was saved of an open page"):
        address = "#layer=0&head=0&query=3&key=2&view=overview"
        page = show(recorded(), address)
        page.wait_for_selector("body[data-read='0,0,3,2,0']")
        buttons = page.locator("#view-overview button").count()
        (tmp_path / "copy.html").write_text(page.content())
        copy = browser.new_page()
        copy.goto(f"file://{tmp_path / 'copy.html'}{address}")
        copy.wait_for_selector("#damage:not([hidden])")
        assert copy.inner_text("#damage") == (
            "Layer 0 is not in this copy: a browser saved it from an open page. "
            "Open the file itself to see the whole."
        )
        assert copy.locator("#view-overview button").count() == buttons
        go(copy, 1, 0, 3, 2)
        assert not copy.is_visible("#damage")
        assert "of its attention to" in sentence(copy)
        copy.close()


@pytest.mark.full
def test_the_damaged_layer_is_named_whichever_is_open_and_a_copy_says_what_it_lacks(
    show: Open, browser: Browser, tmp_path: Path
) -> None:
    page = show(damaged(tmp_path, 1), "#layer=0&head=0&query=3&key=2&compare=beside&with=1.1")
    with step("a damaged head beside leaves the open one whole"):
        page.wait_for_selector(".pane:nth-child(2) .map[data-ready=damaged]")
        page.wait_for_selector('.pane:nth-child(1) .map[data-ready^="0 0 "]')
        assert "of its attention to" in sentence(page)
        assert page.inner_text("#damage").startswith(TOLD.format(1))
    with step("it ends the wait of what is saved"):
        rows = table(page, tmp_path)[1:]
        assert [row[0] for row in rows] == ["layer 0 head 0"] * 9 + ["layer 1 head 1"] * 9
    with step("one map is whole"):
        page.click("button[data-set='compare=alone']")
        page.wait_for_selector("#damage", state="hidden")
    for address in (
        "compare=difference&with=1.1",
        "compare=beside&with=1.1",
    ):
        with step(address):
            visit(page, "#layer=0&head=0&query=3&key=2")
            page.wait_for_selector("#damage", state="hidden")
            visit(page, f"#layer=0&head=0&query=3&key=2&{address}")
            page.wait_for_selector("#damage:not([hidden])")
            assert page.inner_text("#damage").startswith(TOLD.format(1))
    then_saved_copies(page, show, browser, tmp_path)


WORDS_OF_A_PART = (
    "This page is still being read. If it stays so, the file is not whole: copy it again."
)


@pytest.mark.full
def test_a_file_that_is_cut_short_says_so_and_a_whole_one_does_not(
    browser: Browser, tmp_path: Path
) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    text = path.read_text()
    part = tmp_path / "part.html"
    for share, motion in ((0.5, "reduce"), (0.97, "no-preference")):
        with step(f"{share:.0%} of the file"):
            part.write_text(text[: int(share * len(text))])
            page = browser.new_page(reduced_motion=motion)
            page.goto(part.as_uri())
            page.wait_for_selector("#failure")
            assert page.inner_text("#failure") == WORDS_OF_A_PART
            late = "words => getComputedStyle(words).animationDuration"
            assert page.eval_on_selector("#failure", late) == "0.3s"
            page.close()
    with step("a whole file says nothing of being read"):
        page = browser.new_page(reduced_motion="reduce")
        page.add_init_script(
            """const look = () => {
              const words = document.getElementById("failure");
              if (words) window.wereSeen ||= words.checkVisibility({ visibilityProperty: true });
              requestAnimationFrame(look);
            };
            look();"""
        )
        page.goto(path.as_uri())
        page.wait_for_selector("body.ready")
        assert page.inner_text("#failure") == ""
        assert not page.evaluate("window.wereSeen")
        page.close()
    with step("without scripts only that is said"):
        page = browser.new_page(java_script_enabled=False)
        page.goto(path.as_uri())
        page.wait_for_timeout(500)  # until words that wait would be seen
        assert page.is_visible("noscript p")
        assert not page.is_visible("#failure")
        page.close()
    with step("a file whose numbers do not fit"):  # recording.test.mjs has the kinds of damage
        path.write_text(text.replace('"num_heads":2', '"num_heads":3'))
        page = browser.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector("body.failed")
        assert page.inner_text("#failure").startswith("This file is damaged: ")
        assert not page.is_visible("#stage")
        page.close()


# Tokens are hostile text

HEBREW = "12מה שלומך"
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
    HEBREW,
]


def hostile() -> regard.Recording:
    recording = recorded(tokens=len(HOSTILE), heads=2)
    tokens = [regard.Token(text) for text in HOSTILE]
    layers = {"<img src=x onerror=alert(1)>a\u202elayer": recording[0], "b": recording[1]}
    return regard.Recording(
        layers, model="<script>alert(2)</script>\u202eledom", query_tokens=tokens
    )


def test_hostile_words_are_shown_and_nothing_runs(show: Open, tmp_path: Path) -> None:
    path = write_page(hostile(), tmp_path / "x.html", title="\u202ekool")
    page = show(path, "#layer=0&head=0&query=8&key=8")
    ready(page)
    with step("names that would turn their line"):
        assert page.inner_text("#title") == "‹U+202E›kool"
        assert page.inner_text("#about").startswith("<script>alert(2)</script>‹U+202E›ledom · ")
        assert page.inner_text("#about").split(" · ")[1] == "11 tokens"
        assert page.inner_text("#layer-name") == "<img src=x onerror=alert(1)>a‹U+202E›layer"
    for pane in ("#prose", "#view-text .side:nth-child(1)"):
        with step(f"tokens in {pane}"):
            if pane != "#prose":
                visit(page, "#view=text&query=1")
                page.wait_for_selector('body[data-read="0,0,1,1,0"]')
            for at in range(len(HOSTILE) if pane == "#prose" else 0):
                go(page, 0, 0, at, at)
            assert page.locator(":is(#prose, #view-text) :is(img, script, style)").count() == 0
            assert page.inner_text(f'{pane} [data-at="0"]') == HOSTILE[0]
            assert page.inner_text(f'{pane} [data-at="2"]') == "‹U+202E›evil‹U+2066›"
            assert page.inner_text(f'{pane} [data-at="3"]') == "␀null"
            assert page.inner_text(f'{pane} [data-at="6"]') == "‹U+D800›"
            assert len(page.inner_text(f'{pane} [data-at="4"]')) < 200
    with step("a very long token is whole on demand"):
        go(page, 0, 0, 4, 0)
        page.click("#whole-token summary")
        assert page.inner_text("#whole-token pre").strip() == HOSTILE[4].strip()
    with step("a token from right to left stays apart from its place"):
        visit(page, "#view=steps&order=position&query=10")
        page.wait_for_selector("#view-steps tbody [data-row='10']")
        token = page.locator("#view-steps tbody [data-row='10'] th bdi")
        place = page.locator("#view-steps tbody [data-row='10'] th .position")
        assert token.inner_text() == HEBREW
        before, after = token.bounding_box(), place.bounding_box()
        assert before
        assert after
        assert before["x"] + before["width"] <= after["x"]
    assert "pwned" not in page.title()


@pytest.mark.full
def test_a_page_that_does_what_it_must_not_is_seen(browser: Browser, tmp_path: Path) -> None:
    for script, seen in (
        ("console.error('oh')", "console: oh"),
        ("setTimeout(() => { throw Error('oh') })", "error: oh"),
        ("alert(1)", "dialog"),
        ("fetch('http://localhost:9/').catch(() => 0)", "localhost"),
    ):
        with pytest.raises(AssertionError, match=seen), pages.opener(browser, tmp_path) as show:
            show(recorded(), script=script)
