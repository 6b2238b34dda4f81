"""remote.ts, the page's source of numbers over HTTP, asked in Node.js against a real server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import to_builtins

import pages
import regard
from regard.view.tiles.head_tiles import Place
from regard.view.tiles.page_answers import Answers
from regard.view.tiles.protocol import OfHead


def recorded() -> regard.Recording:
    query, key = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(2))
    matrix = regard.attend(query, key, mask=regard.Causal())
    tokens = [regard.Token(f" {place}", special=place == 4) for place in range(9)]
    return regard.Recording({"a": matrix}, query_tokens=tokens)


SOURCE = """
  import {{ Remote }} from "./data/remote";
  import {{ Source }} from "./data/source";
  const {{ fetch }} = globalThis;
  globalThis.fetch = (path, {{ headers, ...how }}) =>
    fetch(`{address}/${{path}}`, {{ ...how, headers: {{ ...headers, Cookie: "{cookie}" }} }});
  const remote = new Source([], new Remote());
"""


def told(serving: pages.Serving, expression: str) -> Any:
    """What an expression gives that asks a server by ``remote``; arrays as lists."""
    if not serving.secret:
        serving.enter()
    port = serving.address.rpartition(":")[2]
    cookie = f"regard-{port}={serving.secret}"
    return pages.evaluated(SOURCE.format(address=serving.address, cookie=cookie), expression)


@pytest.fixture
def serving() -> Iterator[pages.Serving]:
    serving = pages.Serving(recorded())
    yield serving
    serving.end()


@pytest.fixture(scope="module")
def server() -> Iterator[pages.Serving]:
    """For tests that leave it as it is."""
    serving = pages.Serving(recorded())
    yield serving
    serving.end()


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    with Answers(recorded()) as answers:
        yield answers


HEAD = "{ layer: 0, head: 1, hidden: true }"
WHICH = OfHead(0, 1, hidden=True)


def test_a_row_comes_with_its_mask(server: pages.Serving, answers: Answers) -> None:
    got, row = told(server, f"remote.row({HEAD}, 5)"), answers.row(WHICH, 5)
    assert got == {"values": row.values.tolist(), "mask": row.mask.int().tolist()}


def test_a_column_is_what_every_query_gives(server: pages.Serving, answers: Answers) -> None:
    assert told(server, f"remote.column({HEAD}, 2)") == answers.column(WHICH, 2).tolist()


def test_a_tile_comes_with_its_size(server: pages.Serving, answers: Answers) -> None:
    got = told(server, f"remote.tile({HEAD}, {{ level: 0, row: 0, column: 0 }})")
    values = answers.tile(WHICH, Place(0, 0, 0)).values
    assert got["values"] == values.flatten().tolist()
    assert (got["height"], got["width"], got["exact"]) == (9, 9, True)
    assert got.get("sampled") is None


def test_progress_is_told(server: pages.Serving) -> None:
    assert told(server, f"remote.progress({HEAD})") == {"done": 1, "seconds": 0}


def test_steps_are_told(server: pages.Serving, answers: Answers) -> None:
    got = told(server, f"remote.steps({HEAD}, 5, {{ by: 'weight', start: 0, count: 2 }})")
    expected = answers.steps(WHICH, 5, "weight", 0, 2)
    assert [step["key"] for step in got["rows"]] == [step["key"] for step in expected["rows"]]


def test_segments_are_told(server: pages.Serving, answers: Answers) -> None:
    got = told(server, f"remote.segments({HEAD}, {{ queries: [[0, 3], [3, 9]], keys: [[1, 9]] }})")
    expected = answers.segments(WHICH, [(0, 3), (3, 9)], [(1, 9)])
    assert got == expected.flatten().tolist()


def test_heads_are_told_in_their_order(server: pages.Serving, answers: Answers) -> None:
    got, expected = told(server, "remote.heads()"), answers.heads()
    assert got == to_builtins(expected)


def test_small_maps_of_a_layer_are_told(server: pages.Serving, answers: Answers) -> None:
    assert told(server, "remote.overview(0)") == answers.overview(0)


def test_a_wrong_question_is_an_error_with_its_sentence(server: pages.Serving) -> None:
    said = told(server, f"remote.row({HEAD}, 99).catch((e) => e.message)")
    assert said == "query is 99; it must be from 0 to 8."


def test_what_is_aborted_is_rejected_as_such(server: pages.Serving) -> None:
    said = told(
        server,
        f"""(async () => {{
          const stop = new AbortController();
          const row = remote.row({HEAD}, 1, stop.signal).catch((error) => error.name);
          stop.abort();
          return row;
        }})()""",
    )
    assert said == "AbortError"


CHANGED = "the recording has changed on disk; start regard serve again."
LOST = f"remote.row({HEAD}, 1).catch((error) => error.message)"


def test_a_recording_that_has_changed_is_lost(serving: pages.Serving) -> None:
    serving.enter()
    serving.changed = True
    assert told(serving, LOST) == CHANGED


def test_a_server_that_has_ended_is_lost(serving: pages.Serving) -> None:
    serving.enter()
    serving.end()
    assert told(serving, LOST).startswith(
        "The server does not answer any more. Start regard serve again"
    )


@pytest.mark.browser
def test_the_page_shows_the_numbers_of_its_server_and_that_it_is_lost(
    serve: pages.Serve, answers: Answers
) -> None:
    page, serving = serve(recorded(), "#layer=0&head=1&query=5&key=2")
    with pages.step("its numbers"):
        page.wait_for_selector('body[data-read="0,1,5,2,0"]')
        weight = float(answers.row(OfHead(0, 1), 5).values[2])
        assert pages.three_digits(weight) in pages.sentence(page)
    with pages.step("what is wrong is told until all that is shown is whole again"):
        serving.changed = True
        page.evaluate("location.hash = 'layer=0&head=2&query=5&key=3'")
        page.wait_for_selector("#damage:not([hidden])")
        assert page.inner_text("#damage") == CHANGED
        serving.changed = False
        page.locator(".map").first.press("ArrowUp")
        page.wait_for_selector("#damage", state="hidden")
        page.wait_for_selector('.map[data-ready^="0 2 1,"]', timeout=5000)
    with pages.step("where the map is whole again the cell is read again, too"):
        serving.changed = True
        page.evaluate("location.hash = 'layer=0&head=0&query=5&key=2'")
        page.wait_for_selector("#damage:not([hidden])")
        page.wait_for_selector('.map[data-ready="damaged"]', timeout=20000)
        serving.changed = False
        page.locator(".map").first.press("+")
        page.wait_for_selector("#damage", state="hidden", timeout=20000)
        assert "gives" in pages.sentence(page)
    with pages.step("the steps of a head are gone when another one cannot be asked for"):
        page.evaluate("location.hash = 'view=steps&layer=0&head=1&query=5'")
        page.wait_for_selector("#view-steps [data-row]")
        serving.changed = True
        page.evaluate("location.hash = 'view=steps&layer=0&head=2&query=5'")
        page.wait_for_selector("#damage:not([hidden])")
        page.wait_for_selector("#view-steps [data-row]", state="detached", timeout=5000)
        assert page.inner_text("#view-steps h2") == ""
