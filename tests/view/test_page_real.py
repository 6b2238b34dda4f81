"""Every view of real recordings in a real browser: MiniLM, SmolLM2, and 131,072 tokens."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page

import pages
import regard
from pages import Open, sentence, three_digits
from regard.models.pretrained import Pretrained

pytestmark = [pytest.mark.browser, pytest.mark.full]

TEXT = "Life is short. Eat dessert first, said the cook. Nobody at the table asked why."
DRAWN = {
    "overview": "#view-overview button canvas",
    "map": ".map canvas",
    "text": "#view-text .flow span, #view-text .lines text",
    "steps": "#view-steps tbody td",
    "segments": "#view-segments td",
}


def opened(view: str, layer: int, head: int, query: int, key: int) -> str:
    return f"#view={view}&layer={layer}&head={head}&query={query}&key={key}"


def check_view(page: Page, view: str, row: torch.Tensor, key: int) -> None:
    """The view is drawn, and the sentence has the library's number."""
    page.wait_for_selector(DRAWN[view], state="attached")
    page.wait_for_selector("body[data-read]")
    if view == "text":
        assert f": {three_digits(float(row.max()))}" in sentence(page)
    else:
        assert f"gives {three_digits(float(row[key]))} of its attention to" in sentence(page)


@contextmanager
def visited(browser: Browser, serving: pages.Serving, address: str) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{serving.address}/?token={pages.TOKEN}{address}")
    yield page
    page.close()


def test_minilm(show: Open) -> None:
    recording = Pretrained.load().observe(TEXT)
    for view in DRAWN:
        page = show(recording, opened(view, 3, 7, 9, 4))
        check_view(page, view, recording[3][0, 7, 9], 4)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[regard.Recording, pages.Serving]]:
    if "SMOLLM2" not in os.environ:
        pytest.skip("takes minutes; set SMOLLM2 to the folder of the model")
    guide = Path(__file__).parents[2] / "docs" / "heads.md"
    words = " ".join(guide.read_text(encoding="utf-8").split()[:1500])
    recording = Pretrained.load(os.environ["SMOLLM2"]).observe(words)
    assert recording[0].shape[-1] > 2000
    serving = pages.Serving(recording)
    yield recording, serving
    serving.end()


def test_smollm2(
    smollm2: tuple[regard.Recording, pages.Serving],
    browser: Browser,
) -> None:
    recording, serving = smollm2
    for view in DRAWN:
        with visited(browser, serving, opened(view, 18, 6, 900, 0)) as page:
            check_view(page, view, recording[18].to(torch.float32)[0, 6, 900], 0)


@pytest.fixture(scope="module")
def long() -> Iterator[tuple[regard.AttentionMatrix, pages.Serving]]:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 131_072, 16, generator=generator)
    matrix = regard.attend(query, key, mask=regard.Causal())
    tokens = [f" word{place % 977}{'.' if place % 4096 == 0 else ''}" for place in range(131_072)]
    serving = pages.Serving(regard.Recording({"layer": matrix}, query_tokens=tokens))
    yield matrix, serving
    serving.end()


def test_131_072_tokens(
    long: tuple[regard.AttentionMatrix, pages.Serving], browser: Browser
) -> None:
    matrix, serving = long
    for view in sorted({*DRAWN} - {"overview"}):  # one head has no overview
        with (
            pages.step(view),
            visited(browser, serving, opened(view, 0, 0, 100_003, 99_999)) as page,
        ):
            check_view(page, view, matrix[0, 100_003], 99_999)
            if view == "segments":
                check_segments(page, matrix)


def check_segments(page: Page, matrix: regard.AttentionMatrix) -> None:
    """The shares of one part of the queries are the library's."""
    names = page.locator("#view-segments tbody th").count()
    shown = page.locator("#view-segments tbody tr >> nth=20").locator("td")
    told = [shown.nth(place).get_attribute("aria-label") or "" for place in range(names)]
    ends = [0, *range(1, 131_072, 4096), 131_072]
    keys = list(pairwise(ends))
    assert len(keys) == names
    # One part of the queries is enough, and takes the library seconds instead of minutes.
    exact = matrix.segments([keys[20]], keys)[0, 0]
    shares = [float(share.replace("\u202f%", "").replace(" %", "")) / 100 for share in told]
    assert shares == pytest.approx(exact.tolist(), rel=6e-3, abs=1e-7)
