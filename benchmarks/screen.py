"""What moves on the screen: frames while the map is dragged and zoomed, and the page's memory."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import regard
from benchmarks.case import Case, Effort, LeftOut, Measured, need
from benchmarks.meter import peak
from benchmarks.tensors import random_inputs

__all__ = ["CASES"]

LENGTHS = (2_048, 131_072)
GOAL_MS = 33  # 30 frames a second
MOVES = 20  # of the mouse, for each repetition and zoom
PIXELS = 7  # of one move
WHEEL = 20  # of one turn
READY = '.map[data-ready]:not([data-ready=""])'
# Chromium calls back before each frame; what lies between two calls is what a person sees.
WATCH = """() => {
  window.frames_seen = [];
  const note = (at) => { frames_seen.push(at); window.watching = requestAnimationFrame(note); };
  window.watching = requestAnimationFrame(note);
}"""
TOLD = """() => {
  cancelAnimationFrame(watching);
  return frames_seen.slice(1).map((at, i) => at - frames_seen[i]);
}"""

Host = Callable[[Path, int], Any]


def saved(folder: Path, tokens: int) -> Path:
    """A recording of one causal head of random query and key, with words."""
    query, key, _ = random_inputs(tokens, 1)
    matrix = regard.attend(query, key, mask=regard.Causal())
    words = [f" word{place % 977}" for place in range(tokens)]
    path = folder / "run.safetensors"
    regard.Recording({"layer": matrix}, query_tokens=words).save(path)
    return path


@contextmanager
def served(folder: Path, tokens: int) -> Generator[str, None, None]:
    """The address that `regard serve` prints."""
    command = [sys.executable, "-m", "regard", "serve", str(saved(folder, tokens)), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@contextmanager
def written(folder: Path, tokens: int) -> Generator[str, None, None]:
    """The address of the offline file."""
    seen = regard.load(saved(folder, tokens))
    yield regard.page(seen, folder / "page.html", heads=[]).as_uri()


@contextmanager
def looked_at(host: Host, tokens: int) -> Generator[tuple[Any, Any], None, None]:
    """Chromium, and its page with the exact map of the whole."""
    need("playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise LeftOut("no Chromium")
    from playwright.sync_api import sync_playwright

    with (
        TemporaryDirectory() as folder,
        host(Path(folder), tokens) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(300_000)
        page.goto(address)
        page.wait_for_selector(f'{READY}[data-exact="true"]')
        yield browser, page
        browser.close()


def middle_of_map(page: Any) -> tuple[float, float]:
    box = page.locator(".map").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag(page: Any, tokens: int, moves: int) -> list[float]:
    """Milliseconds between frames while the map is dragged, from afar to single tokens."""
    intervals: list[float] = []
    for zoom in (4, 64, tokens // 32):
        row = tokens // 2
        page.evaluate(f"location.hash = 'view=map&zoom={zoom}&row={row}&column={row}'")
        page.wait_for_timeout(300)
        x, y = middle_of_map(page)
        page.mouse.move(x, y)
        page.mouse.down()
        page.evaluate(WATCH)
        for move in range(1, moves + 1):
            page.mouse.move(x - PIXELS * (move % 40), y - PIXELS * (move % 25))
        intervals += page.evaluate(TOLD)
        page.mouse.up()
    return intervals


def zoom(page: Any, _: int, moves: int) -> list[float]:
    """Milliseconds between frames while the wheel zooms in, and out again."""
    page.mouse.move(*middle_of_map(page))
    page.keyboard.down("Control")
    page.evaluate(WATCH)
    for turn in (-WHEEL, WHEEL):
        for _ in range(3 * moves // 2):
            page.mouse.wheel(0, turn)
    intervals = page.evaluate(TOLD)
    page.keyboard.up("Control")
    return intervals


def frames(
    host: Host, move: Callable[[Any, int, int], list[float]]
) -> Callable[[Effort], Measured]:
    """The interval that 95 of 100 frames keep; the middle one beside it."""

    def measure(effort: Effort) -> Measured:
        with looked_at(host, effort.tokens) as (_, page):
            intervals = move(page, effort.tokens, MOVES * effort.repetitions)
        low, *_, high = quantiles(intervals, n=4)
        late = quantiles(intervals, n=20)[-1]
        beside = f"middle {median(intervals):.1f} ms, longest {max(intervals):.0f} ms"
        return Measured(late, len(intervals), low, high, beside=beside)

    return measure


def memory(host: Host) -> Callable[[Effort], Measured]:
    """MiB of the process that shows the page, at its peak, after moving and every view."""

    def measure(effort: Effort) -> Measured:
        with looked_at(host, effort.tokens) as (browser, page):
            drag(page, effort.tokens, MOVES * effort.repetitions)
            zoom(page, effort.tokens, MOVES * effort.repetitions)
            for view in ("overview", "text", "steps", "map"):
                page.evaluate(f"location.hash = 'view={view}'")
                page.wait_for_timeout(2000)
            told = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")
            shown = [one["id"] for one in told["processInfo"] if one["type"] == "renderer"]
            mib = max(peak(str(process)) for process in shown)
        return Measured(mib, 1, mib, mib)

    return measure


CASES = tuple(
    case
    for name, host in (("", served), ("file: ", written))
    for case in (
        Case("page", f"{name}a frame of dragging", "ms", frames(host, drag), LENGTHS, GOAL_MS),
        Case("page", f"{name}a frame of zooming", "ms", frames(host, zoom), LENGTHS, GOAL_MS),
        Case("page", f"{name}memory of the browser's page", "MiB", memory(host), LENGTHS, 500),
    )
)
