"""The server: the same numbers as the library's, for its own page alone, whoever comes and goes."""

import json
import time
from collections.abc import Iterator

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

import regard
from regard.view.server import http_server as server
from regard.view.tiles.head_tiles import Place
from regard.view.tiles.manifest import SMALL, first_sequence, small_numbers
from regard.view.tiles.page_answers import Answers
from regard.view.tiles.protocol import OfHead

BASE = "http://127.0.0.1:8000"
TOKEN = "secret-token"
HEAD = {"layer": 0, "head": 1}


def recorded() -> regard.Recording:
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 3, 9, 4, generator=generator) for _ in range(2))
    matrices = (regard.attend(query[i], key[i], mask=regard.Causal()) for i in range(2))
    tokens = [regard.Token(f" {place}", special=place == 4) for place in range(9)]
    layers = dict(zip("ab", matrices, strict=True))
    return regard.Recording(layers, model="</script><b>", query_tokens=tokens)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The page, opened with its token."""
    with TestClient(server.application(recorded(), TOKEN), base_url=BASE) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


@pytest.fixture
def stranger() -> Iterator[TestClient]:
    """Somebody without the token."""
    with TestClient(server.application(recorded(), TOKEN), base_url=BASE) as client:
        yield client


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    with Answers(recorded()) as answers:
        yield answers


def floats(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


# Numbers


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_row_is_its_weights_and_then_its_mask(
    hidden: int, client: TestClient, answers: Answers
) -> None:
    got = client.get("/api/row", params={**HEAD, "query": 5, "hidden": hidden}).content
    row = answers.row(OfHead(0, 1, bool(hidden)), 5)
    assert torch.equal(floats(got[:36]), row.values)
    assert list(got[36:]) == row.mask.int().tolist()


def test_a_column_is_what_every_query_gives(client: TestClient, answers: Answers) -> None:
    got = client.get("/api/column", params={**HEAD, "key": 2}).content
    assert torch.equal(floats(got), answers.column(OfHead(0, 1), 2))


def test_a_tile_has_its_size_beside_it(client: TestClient, answers: Answers) -> None:
    place = {"level": 0, "row": 0, "column": 0}
    got = client.get("/api/tile", params={**HEAD, **place})
    told = [got.headers[name] for name in ("x-height", "x-width", "x-exact")]
    assert told == ["9", "9", "1"]
    assert "x-sampled" not in got.headers
    expected = answers.tile(OfHead(0, 1), Place(0, 0, 0)).values
    assert torch.equal(floats(got.content), expected.flatten())


def test_progress_of_a_small_head_is_done(client: TestClient) -> None:
    got = client.get("/api/progress", params=HEAD)
    assert got.json() == {"done": 1.0, "seconds": 0.0}


def test_steps_are_those_of_the_library(client: TestClient, answers: Answers) -> None:
    keys = {"by": "weight", "start": 1, "count": 3}
    got = client.get("/api/steps", params={**HEAD, "query": 5, **keys}).json()
    steps = answers.steps(OfHead(0, 1), 5, "weight", 1, 3)
    assert [step["weight"] for step in got["rows"]] == [step["weight"] for step in steps["rows"]]
    assert got["vector"] == pytest.approx(recorded()[0].source.query[1, 5].tolist())
    assert (got["keys"], got["allowed"], got["rows"][0]["value"]) == (9, 6, None)


def test_segments_are_shares_row_by_row(client: TestClient, answers: Answers) -> None:
    queries, keys = [[0, 3], [3, 9]], [[0, 9]]
    parts = {"queries": json.dumps(queries), "keys": json.dumps(keys), "hidden": 1}
    got = client.get("/api/segments", params={**HEAD, **parts})
    expected = answers.segments(OfHead(0, 1, hidden=True), [(0, 3), (3, 9)], [(0, 9)])
    assert torch.equal(floats(got.content), expected.flatten())


def test_heads_have_kinds(client: TestClient) -> None:
    heads = client.get("/api/heads").json()["heads"]
    assert len(heads) == 6
    assert [head["kind"] for head in heads] == list(regard.heads(recorded())["kind"])


def test_the_small_maps_of_a_layer_are_those_of_a_file(client: TestClient) -> None:
    told = client.get("/api/overview", params={"layer": 1}).json()
    assert told == small_numbers(first_sequence(recorded()[1]).pool(SMALL, SMALL))


def test_the_small_map_of_a_long_text_is_a_sample_and_says_so(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.view.tiles.page_answers._MOST_CELLS", 10)
    monkeypatch.setattr("regard.view.tiles.page_answers._SAMPLED_ROWS", 3)
    told = client.get("/api/overview", params={"layer": 0}).json()
    assert (told["sampled"], told["rows"]) == (3, 3)


def test_a_sample_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.view.tiles.head_tiles.AT_ONCE", 0)
    x = torch.randn(1, 600, 4)
    app = server.application(regard.Recording({"a": regard.attend(x, x)}), TOKEN)
    with TestClient(app, base_url=BASE) as client:
        client.get("/", params={"token": TOKEN})
        asked = {"layer": 0, "head": 0, "level": 2, "row": 0, "column": 0}
        got = client.get("/api/tile", params=asked)
        assert (got.headers["x-exact"], got.headers["x-sampled"]) == ("0", "4")
        client.get("/api/column", params={"layer": 0, "head": 0, "key": 0})  # waits for the pass
        assert client.get("/api/tile", params=asked).headers["x-exact"] == "1"


# The page


def test_the_page_holds_its_manifest_and_may_ask_this_server_alone(client: TestClient) -> None:
    page = client.get("/").text
    assert "connect-src 'self';" in page
    text = page.split('<script type="application/json" id="recording">')[1].split("</script>")[0]
    told = json.loads(text)
    assert told["model"] == "</script><b>"
    assert {layer["kind"] for layer in told["layers"]} == {"live"}
    assert "</script><b>" not in page


@pytest.mark.parametrize("path", ["/", "/api/heads", "/api/row", "/nothing"])
def test_every_answer_has_the_headers_that_keep_it_here(path: str, client: TestClient) -> None:
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "server" not in headers


# Who may ask


def test_the_token_becomes_a_cookie_that_no_script_can_read(stranger: TestClient) -> None:
    got = stranger.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (got.status_code, got.headers["location"]) == (303, "/")
    cookie = got.headers["set-cookie"]
    assert cookie.startswith("regard-8000=")
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "referrer-policy" in got.headers


NOT_HERE = "Invalid host header"
NOT_YOU = "another page asks; this server answers its own page only."
CHANGED = "the recording has changed on disk; start regard serve again."
NO_TOKEN = "the token is missing or wrong; open the address that was printed."


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?token=",
        "/?token=wrong",
        "/?token=%E2%82%AC",
        "/api/heads",
        f"/api/heads?token={TOKEN}",
    ],
)
def test_without_the_token_nothing_is_told(path: str, stranger: TestClient) -> None:
    got = stranger.get(path)
    assert (got.status_code, got.text) == (403, NO_TOKEN)


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        pytest.param(
            {"origin": "http://evil.example"},
            NOT_YOU,
            id="origin",
        ),
        pytest.param({"origin": "null"}, NOT_YOU, id="sandbox"),
        pytest.param(
            {"origin": "http://127.0.0.1:9000"},
            NOT_YOU,
            id="another port",
        ),
        pytest.param(
            {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
            NOT_YOU,
            id="an image",
        ),
    ],
)
def test_other_pages_are_refused_even_with_the_cookie(
    headers: dict[str, str], sentence: str, client: TestClient
) -> None:
    got = client.get("/api/heads", headers=headers)
    assert (got.status_code, got.text) == (403, sentence)


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example"])
def test_another_name_is_refused_even_with_the_cookie(host: str, client: TestClient) -> None:
    port = host.partition(":")[2] or "80"
    secret = next(iter(client.cookies.values()))
    headers = {"host": host, "cookie": f"regard-{port}={secret}"}
    got = client.get("/api/heads", headers=headers)
    assert (got.status_code, got.text) == (400, NOT_HERE)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"origin": BASE, "sec-fetch-site": "same-origin"}, id="its own page"),
        pytest.param({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, id="a link"),
    ],
)
def test_its_own_page_is_answered(headers: dict[str, str], client: TestClient) -> None:
    assert client.get("/api/heads", headers=headers).status_code == 200


def test_localhost_has_a_cookie_too(stranger: TestClient) -> None:
    stranger.get("http://localhost:8000/", params={"token": TOKEN})
    assert stranger.get("http://localhost:8000/api/heads").status_code == 200


# Wrong questions

LEVELS = "level is 9; it must be from 0 to 0."
READ = "the question cannot be read: "
PARTS = "/api/segments?layer=0&head=0&keys=[[0,9]]"
MANY = json.dumps([[0, 1]] * 201)
BEYOND = "queries has (0, 10); each span must be non-empty and inside the text."
BEYOND_KEYS = "keys has (4, 10); each span must be non-empty and inside the text."
BOTH = "/api/segments?layer=0&head=0&queries=[[0,9]]"
ONE_TOKEN = "each span must be non-empty and inside the text."
TILE = "/api/tile?layer=0&head=0&level=0&row=0"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/api/row?layer=0&head=0", "Object missing required field 'query'."),
        ("/api/row?layer=-1&head=0&query=0", "Expected 'int' >= 0 - at '$.layer'."),
        ("/api/row?layer=x&head=0&query=0", "Expected 'int', got 'str' - at '$.layer'."),
        ("/api/row?layer=%D9%A1&head=0&query=0", "Expected 'int', got 'str' - at '$.layer'."),
        ("/api/row?layer=0&head=0&query=0&hidden=2", "Expected 'bool', got 'str' - at '$.hidden'."),
        ("/api/row?layer=9999999999&head=0&query=0", "Expected 'int' <= 999999999 - at '$.layer'."),
        ("/api/row?layer=0&head=0&query=0&x=1", "Object contains unknown field 'x'."),
        ("/api/row?layer=0&head=0&query=0&by_row=1", "Object contains unknown field 'by_row'."),
        ("/api/heads?layer=0", "Object contains unknown field 'layer'."),
        (
            "/api/steps?layer=0&head=0&query=0&by=size&start=0&count=1",
            "Invalid enum value 'size' - at '$.by'.",
        ),
        (
            "/api/steps?layer=0&head=0&query=0&by=weight&start=0&count=1001",
            "Expected 'int' <= 1000 - at '$.count'.",
        ),
        (f"{PARTS}", "Object missing required field 'queries'."),
        (f"{PARTS}&queries=[]", "Expected 'array' of length >= 1 - at '$.queries'."),
        (f"{PARTS}&queries=" + "[" * 5000, "Expected 'array', got 'str' - at '$.queries'."),
        (f"{PARTS}&queries=[[0,1.5]]", "Expected 'int', got 'float' - at '$.queries[0][1]'."),
        (f"{PARTS}&queries={MANY}", "Expected 'array' of length <= 200 - at '$.queries'."),
    ],
)
def test_a_question_that_cannot_be_read_is_told_in_a_sentence(
    path: str, sentence: str, client: TestClient
) -> None:
    got = client.get(path)
    assert (got.status_code, got.text) == (400, READ + sentence)
    assert got.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/row?layer=7&head=0&query=0", 400, "layer is 7; it must be from 0 to 1."),
        ("/api/row?layer=0&head=9&query=0", 400, "head is 9; it must be from 0 to 2."),
        ("/api/row?layer=0&head=0&query=9", 400, "query is 9; it must be from 0 to 8."),
        (f"{TILE}&column=1", 400, "column is 1; it must be from 0 to 0."),
        ("/api/tile?layer=0&head=0&level=9&row=0&column=0", 400, LEVELS),
        ("/api/column?layer=0&head=0&key=9", 400, "key is 9; it must be from 0 to 8."),
        (f"{PARTS}&queries=[[0,10]]", 400, BEYOND),
        (f"{BOTH}&keys=[[0,4],[4,10]]", 400, BEYOND_KEYS),
        (f"{BOTH}&keys=[[3,3]]", 400, "keys has (3, 3); " + ONE_TOKEN),
        ("/nothing", 404, "there is nothing at this address."),
        ("/api/../../etc/passwd", 404, "there is nothing at this address."),
    ],
)
def test_a_wrong_question_is_told_in_a_sentence(
    path: str, status: int, sentence: str, client: TestClient
) -> None:
    got = client.get(path)
    assert (got.status_code, got.text) == (status, sentence)
    assert got.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/api/column?layer=0&head=0&key=9", "key is 9; it must be from 0 to 8."),
        (f"{PARTS}&queries=[[0,10]]", BEYOND),
    ],
)
def test_a_wrong_question_does_not_wait_for_the_pass_over_a_long_head(
    path: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.view.tiles.head_tiles.AT_ONCE", 0)
    monkeypatch.setattr(
        "regard.view.tiles.head_tiles.HeadTiles.advance",
        lambda _, pause: (time.sleep(0.01), pause()),
    )
    with TestClient(server.application(recorded(), TOKEN), base_url=BASE) as client:
        client.get("/", params={"token": TOKEN})
        got = client.get(path)
    assert (got.status_code, got.text) == (400, sentence)


def test_only_get_is_answered(client: TestClient) -> None:
    got = client.post("/api/heads", headers={"origin": BASE})
    assert (got.status_code, got.text) == (405, "only GET is answered.")


def test_steps_that_are_not_numbers_are_refused_in_a_sentence() -> None:
    query, key = torch.ones(1, 3, 4), torch.ones(1, 3, 4)
    query[0, 1, 2] = torch.nan
    spoilt = regard.Recording({"layer": regard.attend(query, key)})
    with TestClient(server.application(spoilt, TOKEN), base_url=BASE) as client:
        client.get("/", params={"token": TOKEN})
        got = client.get("/api/steps?layer=0&head=0&query=1&by=weight&start=0&count=3")
    sentence = "query is 1, whose weights are not numbers (NaN); it has no steps to show."
    assert (got.status_code, got.text) == (400, sentence)


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    app = server.application(recorded(), TOKEN)
    monkeypatch.setattr(server.Answers, "heads", lambda *_, **__: 1 / 0)
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        client.get("/", params={"token": TOKEN})
        got = client.get("/api/heads")
    assert got.status_code == 500
    assert got.text == "regard could not answer: ZeroDivisionError: division by zero"


def test_a_bug_is_no_answer_about_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    app = server.application(recorded(), TOKEN)
    monkeypatch.setattr(server.Answers, "row", lambda *_, **__: int("no number"))
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        client.get("/", params={"token": TOKEN})
        got = client.get("/api/row?layer=0&head=0&query=0")
    assert got.status_code == 500
    assert got.text.startswith("regard could not answer: ValueError: invalid literal")


def test_a_recording_that_has_changed_is_not_answered_for() -> None:
    state = {"changed": False}
    app = server.application(recorded(), TOKEN, changed=lambda: state["changed"])
    with TestClient(app, base_url=BASE) as client:
        client.get("/", params={"token": TOKEN})
        assert client.get("/api/heads").status_code == 200
        state["changed"] = True
        got = client.get("/api/heads")
    assert (got.status_code, got.text) == (409, CHANGED)
