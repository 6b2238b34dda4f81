"""Attention in a notebook: shown whole while it is small, and harmlessly; elsewhere as a file."""

import base64
import html
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from playwright.sync_api import Browser

import pages
import regard
from regard.errors import RegardError
from regard.view.notebook import notebook_page as notebook

CELLS = [
    """
    import torch, regard
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, 5, 8)
    A = regard.attend(query, key, mask=regard.Causal())
    seen = regard.Recording({"first": A, "second": A}, model="<b>", query_tokens=list("abcde"))
    """,
    "A",
    "seen",
    "regard.show(A[0, 1], tokens=['a', 'b', 'c', 'd', '</script><script>alert(1)</script>'])",
    "regard.show(torch.eye(3), tokens=['a', 'b', 'c'])",
    "seen.save('run.safetensors'); regard.show('run.safetensors')",
    "regard.Recording({})",
    "A.entropy().shape",
    "x = torch.zeros(1, 9000, 1); regard.attend(x, x)",
    "regard.show(regard.attend(x, x))",
]
PAGES = (1, 2, 3, 4, 5)
WIDGETS = (8, 9)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook, run by a kernel of its own; an error in a cell fails it."""
    cells = [nbformat.v4.new_code_cell("\n".join(map(str.strip, c.splitlines()))) for c in CELLS]
    written = nbformat.v4.new_notebook(cells=cells)
    folder = tmp_path_factory.mktemp("notebook")
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(written, timeout=300, kernel_name="python3", resources=resources).execute()
    return written


def shown(executed: Any, cell: int) -> dict[str, str]:
    [output] = executed.cells[cell].outputs
    return output["data"]


def page_in(media: dict[str, str]) -> str:
    [page] = re.findall(r'srcdoc="([^"]*)"', media["text/html"])
    packed = re.findall(r'id="page">([^<]*)<', html.unescape(page))[0]
    return zlib.decompress(base64.b64decode(packed)).decode()


@pytest.mark.full
@pytest.mark.parametrize("cell", PAGES)
def test_a_cell_shows_the_page_and_says_as_text_what_it_is(executed: Any, cell: int) -> None:
    media = shown(executed, cell)
    assert page_in(media).startswith("<!doctype html>")
    assert media["text/plain"].startswith("AttentionMatrix(" if cell == 1 else "Recording of ")


@pytest.mark.full
def test_what_has_nothing_to_draw_stays_text(executed: Any) -> None:
    assert shown(executed, 6) == {"text/plain": "Recording of a model, 0 layers"}
    assert shown(executed, 7) == {"text/plain": "torch.Size([1, 2, 5])"}


@pytest.mark.full
@pytest.mark.parametrize("cell", WIDGETS)
def test_what_is_too_large_for_a_cell_is_a_widget(executed: Any, cell: int) -> None:
    media = shown(executed, cell)
    assert "application/vnd.jupyter.widget-view+json" in media
    assert media["text/plain"].startswith("AttentionMatrix(" if cell == 8 else "Recording of ")


@pytest.mark.full
@pytest.mark.parametrize("cell", WIDGETS)
def test_of_a_widget_means_of_blocks_stay_where_no_kernel_is(executed: Any, cell: int) -> None:
    page = page_in(shown(executed, cell))
    assert page.startswith("<!doctype html>")
    assert '"kind":"pyramid"' in page


@pytest.mark.full
@pytest.mark.parametrize("cell", PAGES + WIDGETS)
def test_the_frame_lets_the_page_reach_nothing_around_it(executed: Any, cell: int) -> None:
    frame = shown(executed, cell)["text/html"]
    assert re.findall(r' sandbox="([^"]*)"', frame) == ["allow-scripts allow-downloads"]
    assert frame.count("<") == frame.count("</iframe>") + 1


@pytest.mark.browser
@pytest.mark.full
def test_the_page_in_a_cell_draws(executed: Any, browser: Browser, tmp_path: Path) -> None:
    for cell in PAGES:
        with pages.step(f"cell {cell}"):
            host, troubles = tmp_path / "host.html", list[str]()
            host.write_text(f"<!doctype html>{shown(executed, cell)['text/html']}")
            page = browser.new_page()
            page.on("console", lambda message, told=troubles: told.append(message.text))
            page.on("pageerror", lambda error, told=troubles: told.append(str(error)))
            page.on(
                "dialog", lambda dialog, told=troubles: (told.append("dialog"), dialog.dismiss())
            )
            page.goto(host.as_uri())
            frame: Any = page.frames[1]
            frame.wait_for_selector("body.ready, body.failed")
            pages.ready(frame)
            assert "gives" in pages.sentence(frame)
            # A frame that is not allowed forms sends none: the search works without one.
            frame.fill("#find", "nowhere in this text")
            frame.press("#find", "Enter")
            assert frame.inner_text("#found") == "not in this text"
            # The address follows the state a moment later; here there is none.
            page.wait_for_timeout(300)
            page.close()
            assert troubles == []


# What can be shown


def head() -> regard.AttentionMatrix:
    return regard.AttentionMatrix.from_weights(torch.eye(3))


def saved(folder: Path) -> Path:
    regard.Recording({"attention": head()}).save(folder / "run.safetensors")
    return folder / "run.safetensors"


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda _: torch.eye(3), id="weights"),
        pytest.param(lambda _: torch.eye(3)[None, None].half(), id="half precision"),
        pytest.param(lambda _: head(), id="matrix"),
        pytest.param(lambda _: regard.Recording({"attention": head()}), id="recording"),
        pytest.param(saved, id="path"),
        pytest.param(lambda folder: str(saved(folder)), id="path as text"),
    ],
)
def test_elsewhere_it_is_a_file_and_its_place_is_said(
    x: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "work"))
    for _ in range(2):
        regard.show(x(tmp_path), tokens=["a", "b", "c"])
    assert [path.name for path in Path().iterdir()] == ["attention.html"]
    said = capsys.readouterr().out
    place = re.fullmatch(r"(?:The page is in file://(.*/attention\.html)\n){2}", said)
    assert place is not None
    assert '"texts":["a","b","c"]' in Path(place[1]).read_text()


def test_outside_a_notebook_nothing_but_text_is_made() -> None:
    assert head()._repr_mimebundle_() == {}
    assert regard.Recording({"layer": head()})._repr_mimebundle_(include=None, exclude=None) == {}


@pytest.mark.parametrize(
    ("x", "more", "error", "message"),
    [
        pytest.param(
            [[1.0]],
            {},
            TypeError,
            "x is a list; it must be a recording or its path, an AttentionMatrix, or a tensor of "
            "weights.\n    Use torch.as_tensor(x) for an array of weights.",
            id="list",
        ),
        pytest.param(
            head(),
            {"tokens": ["a"]},
            ValueError,
            "query_tokens has 1 tokens; layer 'attention' has q_len = 3.\n"
            "    Give one token for each position, special tokens included.",
            id="tokens",
        ),
        pytest.param(
            regard.Recording({}),
            {},
            RegardError,
            "recording has no layers; a page needs at least one.",
            id="empty",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(
    x: Any, more: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        regard.show(x, **more)
    assert str(raised.value) == message


# Too large to stand in the notebook


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "is_notebook", lambda: True)


def test_without_anywidget_a_large_one_says_what_to_do(
    in_a_notebook: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    x = torch.zeros(1, 9000, 1)
    media = regard.attend(x, x)._repr_mimebundle_()
    assert "pip install anywidget" in media["text/html"]
    assert "<script" not in media["text/html"]
    assert media["text/plain"].startswith("AttentionMatrix(")


def test_answers_alone_are_text(in_a_notebook: None) -> None:
    model = regard.nn.SelfAttention(16, num_heads=2)
    with regard.observe(model, keep=[regard.Entropy()]) as seen:
        model(torch.randn(5, 16))
    assert seen._repr_mimebundle_() == {}


def test_a_small_matrix_adds_little_to_a_notebook() -> None:
    """The page is compressed."""
    media = notebook._drawn(regard.Recording({"attention": head()}))
    assert len(media["text/html"]) < 85_000
