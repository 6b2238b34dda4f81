"""Another text for the model of a server: run once, shown at the same head, and safe."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from playwright.sync_api import expect
from starlette.testclient import TestClient

import pages
import regard
from regard.view.server import http_server as server

BASE = "http://127.0.0.1:8000"
JSON = {"origin": BASE, "content-type": "application/json"}
TEXT = "Life is short"


def read(text: str, tell: Callable[[int, int | None], None]) -> regard.Recording:
    """A model of words: each word has a random query and key of its own, in two layers."""
    words = text.split()
    if len(words) > 20:
        raise regard.RegardError(
            f"text has {len(words)} tokens; tiny reads at most 20 tokens.\n    Give a part of it."
        )
    if "fail" in words:
        raise regard.RegardError("model 'tiny' cannot read text: it fails.\n    Try another one.")
    layers: dict[str, regard.AttentionMatrix] = {}
    for place in range(2):
        generator = torch.Generator().manual_seed(len(words) + place)
        query, key = torch.randn(2, 3, len(words), 4, generator=generator)
        layers[str(place)] = regard.attend(query, key, mask=regard.Causal())
        tell(place + 1, 2)
    return regard.Recording(layers, query_tokens=[f"{word} " for word in words])


def nothing(done: int, layers: int | None) -> None:
    pass


@contextmanager
def served(read: server.Read = read) -> Iterator[TestClient]:
    app = server.application(_read(TEXT), "secret", text=TEXT, read=read)
    with TestClient(app, base_url=BASE) as client:
        client.get("/", params={"token": "secret"})
        yield client


def _read(text: str) -> regard.Recording:
    return read(text, nothing)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with served() as client:
        yield client


def manifest(client: TestClient) -> dict[str, object]:
    block = client.get("/").text.partition('id="recording">')[2].partition("</script>")[0]
    return json.loads(block)


def test_the_model_reads_a_posted_text_and_the_page_shows_it(client: TestClient) -> None:
    before = manifest(client)
    assert (before["text"], before["run"]) == (TEXT, 0)
    got = client.post("/api/text", json={"text": "eat dessert first now"}, headers=JSON)
    assert (got.status_code, got.json()) == (200, {"run": 1})
    after = manifest(client)
    assert (after["text"], after["run"]) == ("eat dessert first now", 1)
    row = client.get("/api/row?layer=1&head=2&query=3", headers={"x-run": "1"}).content
    exact = _read("eat dessert first now")[1][2, 3]
    values = torch.frombuffer(bytearray(row[:16]), dtype=torch.float32)
    torch.testing.assert_close(values, exact)


def test_a_page_of_the_text_before_gets_no_numbers_of_another_one(client: TestClient) -> None:
    client.post("/api/text", json={"text": "one two three"}, headers=JSON)
    for headers in ({"x-run": "0"}, {}):
        got = client.get("/api/row?layer=0&head=0&query=0", headers=headers)
        sentence = "the text was edited in another window; reload this page."
        assert (got.status_code, got.text) == (409, sentence)


def test_progress_is_told_and_one_run_happens_at_a_time() -> None:
    told: list[tuple[int, object]] = []

    def slow(text: str, tell: Callable[[int, int | None], None]) -> regard.Recording:
        tell(1, 2)
        told.append((200, client.get("/api/text").json()))
        second = client.post("/api/text", json={"text": "no"}, headers=JSON)
        told.append((second.status_code, second.text))
        return _read(text)

    with served(slow) as client:
        assert client.post("/api/text", json={"text": "one two"}, headers=JSON).status_code == 200
        assert client.get("/api/text").json()["running"] is False
    assert told == [
        (200, {"running": True, "done": 1, "layers": 2}),
        (409, "the model is running; wait until it is done."),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("  ", "text is empty; attention needs at least one token.", id="empty"),
        pytest.param("a " * 30, "text has 30 tokens; tiny reads at most 20 tokens.", id="too long"),
        pytest.param("fail", "model 'tiny' cannot read text: it fails.", id="error"),
        pytest.param(7, "the request has no text; it must be JSON with a text.", id="no text"),
    ],
)
def test_what_the_model_cannot_read_is_one_sentence_and_changes_nothing(
    text: object, sentence: str, client: TestClient
) -> None:
    got = client.post("/api/text", json={"text": text}, headers=JSON)
    assert (got.status_code, got.text) == (400, sentence)
    assert manifest(client)["run"] == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"content-type": "application/json"}, 403, id="no origin"),
        pytest.param(JSON | {"origin": "http://evil.example"}, 403, id="another origin"),
        pytest.param(JSON | {"sec-fetch-site": "cross-site"}, 403, id="another site"),
        pytest.param({"origin": BASE, "content-type": "text/plain"}, 400, id="a form"),
    ],
)
def test_no_other_page_can_run_the_model(
    headers: dict[str, str], status: int, client: TestClient
) -> None:
    got = client.post("/api/text", content=b'{"text": "one two"}', headers=headers)
    assert got.status_code == status
    assert manifest(client)["run"] == 0


def test_without_the_cookie_the_model_does_not_run() -> None:
    app = server.application(_read(TEXT), "secret", text=TEXT, read=read)
    with TestClient(app, base_url=BASE) as stranger:
        got = stranger.post("/api/text", json={"text": "one two"}, headers=JSON)
    assert got.status_code == 403


def test_a_recording_from_a_file_has_no_text_to_edit() -> None:
    with TestClient(server.application(_read(TEXT), "secret"), base_url=BASE) as client:
        client.get("/", params={"token": "secret"})
        assert "text" not in manifest(client)
        got = client.post("/api/text", json={"text": "one two"}, headers=JSON)
        assert got.status_code == 404


# In a browser


@pytest.mark.full
@pytest.mark.browser
def test_ctrl_enter_shows_the_new_text_at_the_same_head(
    show: pages.Open, serve: pages.Serve
) -> None:
    page, _ = serve(_read(TEXT), "#layer=1&head=2&query=2&key=1", text=TEXT, read=read)
    field = page.get_by_role("textbox", name="Edit the text")
    with pages.step("what the model cannot read is one sentence"):
        page.click("#edit-text")
        assert field.input_value() == TEXT
        field.fill("fail")
        field.press("Control+Enter")
        sentence = "model 'tiny' cannot read text: it fails."
        expect(page.locator("#edit-status")).to_have_text(sentence)
    with pages.step("the new text, at the same head"):
        field.fill("eat dessert first now please")
        field.press("Control+Enter")
        page.wait_for_selector("text=please")
        page.wait_for_selector("body[data-read]")
        assert page.locator("body").get_attribute("data-read", timeout=5000).startswith("1,2,")
        assert page.input_value("#layer") == "1"
        assert page.input_value("#head") == "2"
        page.click("#edit-text")
        assert field.input_value() == "eat dessert first now please"
    with pages.step("an offline page has nothing to edit"):
        assert show(_read(TEXT)).locator("#edit-text").is_hidden()
