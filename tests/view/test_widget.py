"""The page in a notebook that asks the kernel: every answer is the library's, through the frame."""

import base64
import json
import queue
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page

import pages
import regard
from regard.view.notebook import notebook_page as notebook
from regard.view.notebook.widget import PageWidget, reply
from regard.view.tiles import head_tiles
from regard.view.tiles.page_answers import Answers


def recording() -> regard.Recording:
    torch.manual_seed(5)
    layers = {
        f"layer {place}": regard.attend(
            *(2 * torch.randn(2, 1, 2, 7, 8)).unbind(0), mask=regard.Causal()
        )
        for place in range(2)
    }
    return regard.Recording(layers, model="a model", query_tokens=list("abcdefg"))


@pytest.fixture
def widget() -> Iterator[PageWidget]:
    widget = PageWidget(recording(), "A run")
    yield widget
    widget.close()


@pytest.fixture
def sent(widget: PageWidget, monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[Any]":
    """What goes to the notebook."""
    messages: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(widget, "send", lambda *message: messages.put(message))
    return messages


def asked(question: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    with Answers(recording()) as answers:
        content, arrays = reply(answers, {"id": 1, **question}, lambda: True) or ({}, [])
    assert content.pop("id") == 1
    kinds = (torch.float32, torch.uint8)  # values, and the mask of a row
    json.dumps(content, allow_nan=False)
    return content, [
        torch.frombuffer(bytearray(data), dtype=kind)
        for data, kind in zip(arrays, kinds, strict=False)
    ]


HEAD = {"layer": 1, "head": 1}


def weights() -> torch.Tensor:
    return recording()[1].to_dense()[0, 1]


def test_a_row_has_its_weights_and_what_may_be_attended_to() -> None:
    _, (values, mask) = asked({"kind": "row", **HEAD, "query": 3})
    torch.testing.assert_close(values, weights()[3])
    assert mask.tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_with_sinks_set_aside_a_row_sums_to_one_again() -> None:
    _, (values, mask) = asked({"kind": "row", **HEAD, "query": 3, "hidden": True})
    expected = weights()[3] * torch.tensor([0, 1, 1, 1, 0, 0, 0])
    torch.testing.assert_close(values, expected / expected.sum())
    assert mask[0] == 0


def test_a_column_has_what_every_query_gives() -> None:
    _, (values,) = asked({"kind": "column", **HEAD, "key": 2})
    torch.testing.assert_close(values, weights()[:, 2])


def test_a_tile_has_the_cells_and_their_size() -> None:
    content, (values,) = asked({"kind": "tile", **HEAD, "level": 0, "row": 0, "column": 0})
    assert content == {"height": 7, "width": 7, "exact": True, "sampled": None}
    torch.testing.assert_close(values.reshape(7, 7), weights())


def test_a_small_head_has_no_progress_to_make() -> None:
    assert asked({"kind": "progress", **HEAD})[0] == {"done": 1.0, "seconds": 0.0}


def test_steps_are_those_of_the_strongest_keys() -> None:
    question = {"kind": "steps", **HEAD, "query": 6, "by": "weight", "start": 0, "count": 2}
    steps = asked(question)[0]
    top = recording()[1].topk(2)
    assert [row["key"] for row in steps["rows"]] == top.indices[0, 1, 6].tolist()


@pytest.mark.parametrize("hidden", [False, True])
def test_segments_are_the_shares_of_one_head(hidden: bool) -> None:
    spans = {"queries": [[1, 3], [3, 7]], "keys": [[1, 7]]}
    _, (values,) = asked({"kind": "segments", **HEAD, **spans, "hidden": hidden})
    shares = regard.segment_shares(
        recording(), {"all": (1, 7)}, queries={"start": (1, 3), "rest": (3, 7)}, sinks=not hidden
    )
    torch.testing.assert_close(values.reshape(2, 1), shares.weights[1, 1])


def test_heads_have_their_kinds() -> None:
    heads = asked({"kind": "heads"})[0]["heads"]
    assert tuple(head["kind"] for head in heads) == regard.heads(recording())["kind"]


@pytest.mark.parametrize(
    ("question", "error"),
    [
        pytest.param(
            {"kind": "row", "layer": 9, "head": 0, "query": 0},
            "layer is 9; it must be from 0 to 1.",
            id="no such layer",
        ),
        pytest.param(
            {"kind": "row", "layer": "first", "head": 0, "query": 0},
            "the question cannot be read: Expected 'int', got 'str' - at '$.layer'.",
            id="text",
        ),
        pytest.param(
            {"kind": "row", "layer": None, "head": 0, "query": 0},
            "the question cannot be read: Expected 'int', got 'null' - at '$.layer'.",
            id="nothing said",
        ),
        pytest.param(
            {"kind": "column", "layer": -1, "head": 0, "key": 0},
            "the question cannot be read: Expected 'int' >= 0 - at '$.layer'.",
            id="below 0",
        ),
        pytest.param(
            {"kind": "segments", "layer": 0, "head": 5, "queries": [[0, 1]], "keys": [[0, 1]]},
            "head is 5; it must be from 0 to 1.",
            id="segments of no such head",
        ),
        pytest.param(
            {"kind": "import"}, "kind is 'import'; nothing of that kind is known.", id="kind"
        ),
        pytest.param(
            {"kind": [1]}, "kind is [1]; nothing of that kind is known.", id="no kind at all"
        ),
        pytest.param({}, "kind is None; nothing of that kind is known.", id="nothing"),
        pytest.param(
            {"kind": "steps", **HEAD, "query": 0, "by": "name"},
            "the question cannot be read: Invalid enum value 'name' - at '$.by'.",
            id="order",
        ),
        pytest.param(
            {"kind": "segments", **HEAD, "queries": [[0, 9]], "keys": [[0, 7]]},
            "queries has (0, 9); each span must be non-empty and inside the text.",
            id="spans",
        ),
        pytest.param(
            {"kind": "row", **HEAD, "query": 0, "x": 1},
            "the question cannot be read: Object contains unknown field 'x'.",
            id="another parameter",
        ),
        pytest.param(
            {"kind": "segments", **HEAD, "queries": 3, "keys": [[0, 7]]},
            "the question cannot be read: Expected 'array', got 'int' - at '$.queries'.",
            id="no spans",
        ),
    ],
)
def test_a_wrong_question_is_answered_with_one_sentence(
    question: dict[str, Any], error: str
) -> None:
    content, _ = asked(question)
    assert content == {"error": error}


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the page would wait for ever: nobody looks at a thread's error."""
    monkeypatch.setattr(Answers, "row", lambda *_, **__: 1 / 0)
    content, _ = asked({"kind": "row", **HEAD, "query": 0})
    error = "regard could not answer: ZeroDivisionError: division by zero"
    assert content == {"error": error}


# The widget


def test_an_answer_carries_the_id_of_its_question(
    widget: PageWidget, sent: "queue.Queue[Any]"
) -> None:
    widget.take(None, {"id": ["view", 7], "kind": "column", **HEAD, "key": 0}, [])
    content, buffers = sent.get(timeout=60)
    assert content == {"id": ["view", 7]}
    assert len(buffers[0]) == 7 * 4


def test_that_it_listens_it_says_at_once(widget: PageWidget, sent: "queue.Queue[Any]") -> None:
    widget.take(None, {"id": ["view", 0], "kind": "listens"}, [])
    assert sent.get_nowait() == ({"id": ["view", 0]},)


def test_what_is_forgotten_is_not_answered(widget: PageWidget, sent: "queue.Queue[Any]") -> None:
    for number in range(40):
        widget.take(None, {"id": number, "kind": "row", **HEAD, "query": 0}, [])
        widget.take(None, {"id": number, "kind": "forget"}, [])
    widget.take(None, {"id": "last", "kind": "row", **HEAD, "query": 0}, [])
    answered = []
    while "last" not in answered:
        answered.append(sent.get(timeout=60)[0]["id"])
    assert len(answered) < 41


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head is a long one, and its pass never ends."""
    monkeypatch.setattr(head_tiles, "AT_ONCE", 0)
    monkeypatch.setattr(
        head_tiles.HeadTiles, "advance", lambda _, pause: (time.sleep(0.01), pause())
    )


@pytest.mark.usefixtures("endless")
def test_what_waits_for_a_pass_holds_up_nothing_else(
    widget: PageWidget, sent: "queue.Queue[Any]"
) -> None:
    part = {"level": 0, "row": 0, "column": 0}
    widget.take(None, {"id": "progress", "kind": "progress", **HEAD}, [])
    assert sent.get(timeout=60)[0]["id"] == "progress"
    for waits in 6 * [{"kind": "column", "key": 2}]:
        widget.take(None, {"id": waits["kind"], **HEAD, **waits}, [])
    widget.take(None, {"id": "heads", "kind": "heads"}, [])
    for quick in ({"kind": "tile", **part}, {"kind": "progress"}, {"kind": "row", "query": 3}):
        widget.take(None, {"id": quick["kind"], **HEAD, **quick}, [])
    widget.take(None, {"id": "overview", "kind": "overview", "layer": 0}, [])
    answered: set[str] = set()
    while not answered >= {"tile", "progress", "row", "overview"}:
        answered.add(sent.get(timeout=60)[0]["id"])
    assert answered.isdisjoint({"column", "heads"})


@pytest.mark.usefixtures("endless")
def test_many_columns_hold_up_no_row(widget: PageWidget, sent: "queue.Queue[Any]") -> None:
    for number in range(50):  # a mean of so many heads
        widget.take(None, {"id": number, "kind": "column", **HEAD, "key": 2}, [])
    widget.take(None, {"id": "row", "kind": "row", **HEAD, "query": 3}, [])
    assert sent.get(timeout=60)[0]["id"] == "row"


def test_it_tells_the_notebook_the_page_and_nothing_of_the_numbers(widget: PageWidget) -> None:
    state = widget.get_state()
    assert '"title":"A run"' in state["page"]
    assert state["sandbox"] == "allow-scripts allow-downloads"
    assert '"kind":"live"' in state["page"]


def test_a_large_recording_is_shown_as_a_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "is_notebook", lambda: True)
    x = torch.zeros(1, 9000, 1)
    media = regard.attend(x, x)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in media
    assert media["text/plain"].startswith("AttentionMatrix(")


# Through the frame, in a browser


def embedded(
    browser: Browser, widget: PageWidget, sent: "queue.Queue[Any]", folder: Path, inner: str
) -> tuple[Any, Any]:
    """A bare page with a model that the widget answers, and the frame in it."""

    def ask(question: Any) -> Any:
        widget.take(None, question, [])
        if question["kind"] == "forget":
            return [{}, []]
        content, *buffers = sent.get(timeout=60)
        return [content, [base64.b64encode(data).decode() for data in chain(*buffers)]]

    host = folder / "host.html"
    host.write_text("<!doctype html><body></body>")
    page = browser.new_page(viewport={"width": 1000, "height": 720})
    page.expose_function("ask", ask)
    page.goto(host.as_uri())
    module = (pages.FOLDER / "data" / "widget.ts").read_text()
    module = module.replace("10_000", "300").replace("2_000", "100")  # milliseconds
    module = module.replace("../dom", "./dom")  # it is bundled from the folder above
    page.evaluate(MODEL.replace("MODULE", pages.script_of(module)), inner)
    page.wait_for_selector("iframe")
    return page, page.frames[1]


@pytest.fixture
def framed(
    browser: Browser, widget: PageWidget, sent: "queue.Queue[Any]", tmp_path: Path
) -> Iterator[Any]:
    """A page of nothing but the source, in a frame, beside a model that the widget answers."""
    source = """
      import { framed } from "./data/remote";
      import { Source } from "./data/source";
      globalThis.source = new Source([], framed());
    """
    inner = f"<!doctype html><script>{pages.script_of(source)}</script>"
    page, frame = embedded(browser, widget, sent, tmp_path, inner)
    frame.wait_for_function("typeof source === 'object'")
    yield frame
    page.close()


MODEL = """(inner) => {
  MODULE
  const listeners = [];
  const model = {
    get: (name) => ({ page: inner, title: "A run", sandbox: "allow-scripts", height: "300" })[name],
    on: (event, listener) => listeners.push(listener),
    off: () => {},
    send(question) {
      (window.kinds ??= []).push(question.kind);
      if (window.ended) throw new Error("Cannot send");
      const swallowed = window.busy || (window.long && question.kind !== "listens");
      if (!swallowed) void this.answer(question);
    },
    async answer(question) {
      const [content, buffers] = await window.ask(question);
      const views = buffers.map((text) => {
        // Not aligned, and in the middle of a larger buffer, as they come from a kernel.
        const bytes = Uint8Array.from(" " + atob(text), (character) => character.charCodeAt(0));
        return new DataView(bytes.buffer, 1);
      });
      for (const listener of listeners) listener(content, views);
    },
  };
  window.remove = parts.default.render({ model, el: document.body });
}"""
GONE = "The kernel of this notebook does not answer any more. Run the cell again."
BUSY = (
    "The kernel of this notebook does not answer yet: it is busy with another cell, or it has "
    "ended. If it has ended, run this cell again."
)
ONE = "{ layer: 1, head: 1, hidden: false }"


def then_kernels_that_do_not_answer(page: Page, framed: Any, note: Locator, row: str) -> None:
    with pages.step("while the kernel does not listen the cell says so"):
        page.evaluate("window.busy = true")
        framed.evaluate(f"void {row}")
        note.wait_for(state="visible")
        assert note.inner_text() == BUSY
        page.evaluate("window.busy = false")
        note.wait_for(state="hidden")
    with pages.step("a kernel that ends before it answers is noticed"):
        page.evaluate("window.busy = true")
        framed.evaluate(f"void {row}.catch((error) => {{ window.told = error.message }})")
        page.evaluate("window.ended = true")
        framed.wait_for_function("window.told")
        assert framed.evaluate("window.told") == GONE
    with pages.step("one that has ended is told"):
        page.evaluate("window.busy = false")
        assert framed.evaluate(f"{row}.catch((error) => error.message)") == GONE
        page.evaluate("window.ended = false")
    with pages.step("a frame that is taken away waits for nothing and leaves no listener"):
        page.evaluate("window.busy = true; window.kinds = []")
        framed.evaluate(f"void {row}")
        page.wait_for_function("window.kinds?.includes('row')")
        page.evaluate("window.remove()")
        assert page.evaluate("window.kinds").count("forget") == 1
        assert page.query_selector("iframe") is None


@pytest.mark.browser
@pytest.mark.full
def test_the_frame_gets_numbers_or_a_sentence(framed: Any) -> None:
    page = framed.page
    row = f"source.row({ONE}, 3)"
    with pages.step("the library's numbers"):
        found = framed.evaluate(f"{row}.then(({{ values, mask }}) => [[...values], [...mask]])")
        torch.testing.assert_close(torch.tensor(found[0]), weights()[3])
        assert found[1] == [1, 1, 1, 1, 0, 0, 0]
        column = framed.evaluate(f"source.column({ONE}, 2).then((values) => [...values])")
        torch.testing.assert_close(torch.tensor(column), weights()[:, 2])
        tile = framed.evaluate(
            f"source.tile({ONE}, {{ level: 0, row: 0, column: 0 }})"
            ".then(({ values, height, width, exact }) => [[...values], height, width, exact])"
        )
        torch.testing.assert_close(torch.tensor(tile[0]).reshape(7, 7), weights())
        assert tile[1:] == [7, 7, True]
    with pages.step("what was wrong"):
        sentence = (
            "source.row({ layer: 7, head: 0, hidden: false }, 0).catch((error) => error.message)"
        )
        assert framed.evaluate(sentence) == "layer is 7; it must be from 0 to 1."
    note = page.locator("p[role=status]")
    with pages.step("while the kernel listens an answer may take long"):
        page.evaluate("window.long = true")
        framed.evaluate(f"void {row}")
        page.wait_for_timeout(600)
        assert note.is_hidden()
        page.evaluate("window.long = false")
    then_kernels_that_do_not_answer(page, framed, note, row)


@pytest.mark.browser
def test_the_page_draws_what_the_kernel_answers(
    browser: Browser, widget: PageWidget, sent: "queue.Queue[Any]", tmp_path: Path
) -> None:
    troubles: list[str] = []
    page, _ = embedded(browser, widget, sent, tmp_path, widget.page)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    frame: Any = page.frames[1]
    frame.wait_for_selector("body.ready, body.failed")
    pages.ready(frame)
    frame.wait_for_selector("body[data-read]")
    layer, head, query, key, _ = map(int, frame.get_attribute("body", "data-read").split(","))
    share = recording()[layer].to_dense()[0, head, query, key].item()
    assert f"gives {pages.three_digits(share)} of its attention" in pages.sentence(frame)
    assert troubles == []
    page.close()
