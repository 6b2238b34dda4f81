"""Whatever is sent to the server, it answers in a sentence, never with an error of its own."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import pages
import regard
from regard.view.server import http_server as server
from regard.view.tiles.protocol import QUESTIONS

BASE = "http://127.0.0.1:8000"
GOOD = (
    dict.fromkeys(("head", "hidden"), "1")
    | dict.fromkeys(("by_row", "layer", "level", "row", "column", "start"), "0")
    | dict.fromkeys(("query", "key", "count"), "3")
    | {"by": "weight", "queries": "[[0,3],[3,9]]", "keys": "[[0,9]]"}
)


def recorded() -> regard.Recording:
    """A layer of numbers, and one with a NaN in it."""
    query, key = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    spoilt = query.clone()
    spoilt[1, 3, 0] = torch.nan
    layers = {
        "numbers": regard.attend(query, key, mask=regard.Causal()),
        "NaN": regard.attend(spoilt, key),
    }
    return regard.Recording(layers)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(server.application(recorded(), pages.TOKEN), base_url=BASE) as client:
        client.get("/", params={"token": pages.TOKEN})
        yield client


texts = st.one_of(
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.integers(0, 10).map(str),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=4).map(json.dumps),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
    ).map(json.dumps),
    st.sampled_from(
        ["weight", "position", "[" * 5000, "9" * 5000, "[[0,1e400]]", "\x00", "\u0661"]
    ),
)


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(QUESTIONS)),
    wrong=st.dictionaries(st.sampled_from([*GOOD, "token", "x"]), texts, max_size=3),
    left_out=st.sets(st.sampled_from(sorted(GOOD)), max_size=2),
)
def test_every_question_has_numbers_or_one_sentence(
    name: str, wrong: dict[str, str], left_out: set[str], client: TestClient
) -> None:
    fields = QUESTIONS[name][0].__struct_fields__
    known = {each: text for each, text in GOOD.items() if each in fields}
    asked = {each: text for each, text in {**known, **wrong}.items() if each not in left_out}
    answer = client.get(f"/api/{name}", params=asked)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.text.endswith(".")
        assert "\n" not in answer.text


COOKIE = b"Host: 127.0.0.1:PORT\r\nCookie: regard-PORT=SECRET\r\nConnection: close\r\n\r\n"
ROW = f"/api/row?{urlencode({'layer': 0, 'head': 1, 'query': 3})}".encode()
RAW = {
    "a long number": b"GET /api/row?layer=" + 60_000 * b"1" + b" HTTP/1.1\r\n" + COOKIE,
    "10 MB of address": b"GET /api/row?layer=" + 10_000_000 * b"1" + b" HTTP/1.1\r\n" + COOKIE,
    "bytes": bytes(range(256)) * 100,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "no host": b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
    "another address": b"GET http://elsewhere/api/heads HTTP/1.1\r\n" + COOKIE,
    "no text": b"GET /api/row?layer=%ed%a0%80%ff HTTP/1.1\r\nX: \xff\r\n" + COOKIE,
    "a body": b"POST /api/heads HTTP/1.1\r\nContent-Length: 9999999\r\n" + COOKIE + 10**6 * b"x",
}


@pytest.fixture(scope="module")
def serving() -> Iterator[pages.Serving]:
    serving = pages.Serving(recorded())
    serving.enter()
    yield serving
    serving.end()


def connected(serving: pages.Serving) -> socket.socket:
    host, _, port = serving.address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def with_cookie(request: bytes, serving: pages.Serving) -> bytes:
    port = serving.address.rpartition(":")[2]
    return request.replace(b"PORT", port.encode()).replace(b"SECRET", serving.secret.encode())


def sent(serving: pages.Serving, request: bytes) -> bytes:
    """The first line of the answer; nothing where the connection is closed instead."""
    with connected(serving) as connection:
        try:
            connection.sendall(with_cookie(request, serving))
            return connection.recv(65536).partition(b"\r\n")[0]
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_question_is_refused_and_the_next_is_answered(
    name: str, serving: pages.Serving
) -> None:
    status = sent(serving, RAW[name])
    assert status == b"" or b" 40" in status
    assert sent(serving, b"GET " + ROW + b" HTTP/1.1\r\n" + COOKIE) == b"HTTP/1.1 200 OK"


def test_a_question_does_not_wait_for_a_body_that_never_comes(serving: pages.Serving) -> None:
    request = b"GET /api/heads HTTP/1.1\r\nContent-Length: 99\r\n" + COOKIE
    assert sent(serving, request) == b"HTTP/1.1 200 OK"
    assert sent(serving, b"GET " + ROW + b" HTTP/1.1\r\n" + COOKIE) == b"HTTP/1.1 200 OK"


def test_200_who_send_half_a_request_hold_up_nobody(serving: pages.Serving) -> None:
    slow = [connected(serving) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"GET /api/he")
    assert sent(serving, b"GET " + ROW + b" HTTP/1.1\r\n" + COOKIE) == b"HTTP/1.1 200 OK"
    for connection in slow:
        connection.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUESTIONS)
def test_200_who_leave_before_the_answer_hold_up_nobody(name: str, serving: pages.Serving) -> None:
    fields = QUESTIONS[name][0].__struct_fields__
    known = {each: text for each, text in GOOD.items() if each in fields}
    address = f"GET /api/{name}?{urlencode(known)} HTTP/1.1\r\n".encode()
    for _ in range(200):
        with connected(serving) as connection:
            connection.sendall(with_cookie(address + COOKIE, serving))
    assert sent(serving, b"GET " + ROW + b" HTTP/1.1\r\n" + COOKIE) == b"HTTP/1.1 200 OK"
