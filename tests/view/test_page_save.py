"""What the page shows can be taken along: on paper, its numbers as CSV."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Download, Page, Route

import pages
import regard
from pages import WORDS, Open, ready, recorded, saved, step, table, visit
from regard.view.export.page_file import write_page
from regard.view.notebook.page_frame import framed

pytestmark = pytest.mark.browser

NAMES = ["[CLS]", *WORDS[:8]]


@contextmanager
def held(
    browser: Browser, recording: regard.Recording, answers: str, address: str
) -> Iterator[tuple[Page, Callable[[], None]]]:
    """A page whose server holds some answers back, and what lets them go."""
    serving = pages.Serving(recording)
    page = browser.new_page()
    page.set_default_timeout(20_000)
    waiting: list[Route] | None = []

    def hold(route: Route) -> None:
        if waiting is None:
            route.continue_()
        else:
            waiting.append(route)

    def let_go() -> None:
        nonlocal waiting
        routes, waiting = waiting or [], None
        for route in routes:
            route.continue_()

    page.route(f"**/api/{answers}", hold)
    try:
        with page.expect_request(f"**/api/{answers}"):
            page.goto(f"{serving.address}/?token={pages.TOKEN}#{address}")
        page.wait_for_selector("body.ready")
        yield page, let_go
    finally:
        page.close()
        serving.end()


SEEN_LATER = {
    "map": ("tile?*", "zoom=2&query=1&key=1"),
    "text": ("column?*", "view=text&query=5&key=5"),
    "lines of the text": ("tile?*", "view=text&query=5&key=5"),
    "steps": ("steps?*", "view=steps&query=5&key=5"),
    "segments": ("segments?*", "view=segments&query=5&key=5"),
    "overview": ("heads*", "view=overview&query=5&key=5"),
}
FIRST = "view=steps&layer=0&head=0"


@pytest.mark.full
def test_what_is_saved_waits_for_what_is_seen_or_is_given_up(
    browser: Browser, tmp_path: Path
) -> None:
    for view, (answers, address) in SEEN_LATER.items():
        with step(view), held(browser, recorded(tokens=47), answers, address) as (page, let_go):
            page.click("#save summary")
            with page.expect_download() as download:
                page.click("[data-save=csv]")
                page.wait_for_timeout(300)  # what does not wait is there by now
                let_go()
            download.value.save_as(tmp_path / "early")
            page.wait_for_timeout(300)  # what came by halves is whole by now
            assert (tmp_path / "early").read_bytes() == saved(page, tmp_path).read_bytes()
    with (
        step("it says that it waits, and is given up where something else is opened"),
        held(browser, recorded(), "steps?*", f"{FIRST}&query=5&key=5") as (page, let_go),
    ):
        downloads: list[Download] = []
        page.on("download", lambda download: downloads.extend([download]))
        page.click("#save summary")
        page.click("[data-save=csv]")
        page.wait_for_selector("#saving[role=status]:has-text('Saving …')")
        page.keyboard.press("]")
        page.wait_for_selector("#saving:has-text('Nothing was saved')")
        assert page.inner_text("#saving") == (
            "Nothing was saved: another view, layer or head was opened meanwhile."
        )
        let_go()
        page.wait_for_timeout(300)
        assert downloads == []


@pytest.mark.full
def test_the_name_of_a_saved_file_says_what_it_holds_and_is_harmless(
    show: Open, tmp_path: Path
) -> None:
    path = write_page(recorded(), tmp_path / "x.html", title="../ a <b>title</b>\u202e: “é”")
    page = show(path, "#layer=1&head=1&scale=log")
    ready(page)
    assert saved(page, tmp_path).name == "a-b-title-b-e-map-layer-1-head-1.csv"


PRINTS = "window.print = () => { document.documentElement.dataset.printed = 'yes' }"


def then_paper_and_frames(show: Open, tmp_path: Path, browser: Browser) -> None:
    with step("numbers above words are on paper"):
        page = show(recorded(), "#view=text&query=5")
        page.wait_for_selector("#view-text [data-share]")
        page.emulate_media(media="print")
        content = "one => getComputedStyle(one, '::before').content"
        share = page.get_attribute("#view-text [data-share]", "data-share")
        assert page.eval_on_selector("#view-text [data-share]", content) == f'"{share}"'
        exact = "getComputedStyle(document.documentElement).printColorAdjust"
        assert page.evaluate(exact) == "exact"
    with step("the frame of a notebook may not print"):
        inner = write_page(recorded(), tmp_path / "page.html").read_text()
        host = tmp_path / "host.html"
        host.write_text(f"<!doctype html>{framed(inner, 'attention')}")
        page = browser.new_page()
        page.goto(host.as_uri())
        frame = page.frames[1]
        frame.wait_for_selector("body.ready")
        frame.click("button[data-set='view=text']")
        frame.click("#save summary")
        assert frame.inner_text("#save div").split("\n") == ["Numbers, CSV"]
        page.close()


@pytest.mark.full
def test_the_menu_offers_what_a_view_has_and_paper_shows_the_whole(
    show: Open, browser: Browser, tmp_path: Path
) -> None:
    page = show(recorded(tokens=300, mask=regard.Causal()), "#view=map", script=PRINTS)
    page.click("#save summary")
    with step("a view is numbers, and can be printed"):
        assert page.inner_text("#save div").split("\n") == ["Numbers, CSV", "Print, or save as PDF"]
    page.click("#save summary")
    for view in ("text", "steps"):
        with step(f"{view} is printed"):
            visit(page, f"#view={view}&query=5&key=5")
            page.wait_for_selector(f'body[data-view="{view}"]')
            page.evaluate("delete document.documentElement.dataset.printed")
            page.click("#save summary")
            page.click("[data-save=print]")
            page.wait_for_selector("[data-printed=yes]")
    scrolls = """all => all.filter(e => e.checkVisibility() && e.clientHeight > 0
      && getComputedStyle(e).overflowY !== "visible" && e.scrollHeight > e.clientHeight + 1)
      .map(e => e.id || e.className)"""
    pressed = "all => all.filter(e => e.checkVisibility()).map(e => e.outerHTML)"
    for view in ("overview", "map", "text", "steps", "segments"):
        with step(f"on paper {view} is whole and has nothing to press"):
            page.emulate_media(media="screen")
            visit(page, f"#view={view}&query=250&key=5")
            page.wait_for_selector(f'body[data-view="{view}"]')
            page.wait_for_timeout(500)
            page.emulate_media(media="print")
            assert page.eval_on_selector_all("body *", scrolls) == []
            buttons = ".choices *, .pressed *, #tabs *, #save *"
            assert page.eval_on_selector_all(buttons, pressed) == []
            assert page.is_visible("#title")
            assert page.is_visible(f"#view-{view}")
    then_paper_and_frames(show, tmp_path, browser)


def numbers(rows: list[list[str]]) -> torch.Tensor:
    return torch.tensor([[float(cell) for cell in row[3:]] for row in rows])


@pytest.mark.full
def test_the_cells_that_are_seen_are_saved_as_a_table(show: Open, tmp_path: Path) -> None:
    recording = recorded(tokens=9)
    page = show(recording, "#layer=1&head=1")
    ready(page)
    with step("one map"):
        head, *rows = table(page, tmp_path)
        assert head[:3] == ["share of attention", "query", "token"]
        assert head[3:] == [f"{at} {name}" for at, name in enumerate(NAMES)]
        assert [row[:3] for row in rows] == [
            ["layer 1 head 1", str(at), name] for at, name in enumerate(NAMES)
        ]
        near = {"atol": 1e-6, "rtol": 1e-5}
        torch.testing.assert_close(numbers(rows), recording[1][0, 1].to_dense(), **near)
    with step("two maps"):
        visit(page, "#layer=0&head=0&compare=beside&with=1.1")
        page.wait_for_selector('.pane:nth-child(1) .map[data-ready^="0 0 "]')
        page.wait_for_selector('.pane:nth-child(2) .map[data-ready]:not([data-ready=""])')
        rows = table(page, tmp_path)[1:]
        assert [row[0] for row in rows] == ["layer 0 head 0"] * 9 + ["layer 1 head 1"] * 9
        expected = torch.cat([recording[0][0, 0].to_dense(), recording[1][0, 1].to_dense()])
        torch.testing.assert_close(numbers(rows), expected, **near)
    with step("of a long text, the blocks that are seen"):
        recording = recorded(tokens=1031, mask=regard.Causal())
        page = show(recording)
        ready(page)
        head, *rows = table(page, tmp_path)
        assert head[0] == "share of attention per 4 keys"
        assert (head[3][:4], rows[-1][1]) == ("0–3 ", "1028–1030")
        cells = recording[0][0, 0].to_dense().split(4)
        expected = [[part.sum(-1).mean() for part in rows.split(4, -1)] for rows in cells]
        torch.testing.assert_close(numbers(rows), torch.tensor(expected), atol=1e-5, rtol=1e-4)
