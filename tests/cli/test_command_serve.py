"""regard serve: one line, one page, and a clean end; a real server on a free port."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from playwright.sync_api import Browser
from starlette.testclient import TestClient
from starlette.types import ASGIApp

import regard
from commands import REGARD, Run
from regard.analysis.head_classes import Trial
from regard.cli import serve_command
from regard.models.pretrained import Pretrained
from regard.view.server import http_server as server


def saved(folder: Path, tokens: int = 9) -> Path:
    x = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(1))
    path = folder / "run.safetensors"
    regard.Recording({"a": regard.attend(x, x, mask=regard.Causal())}, model="tiny").save(path)
    return path


ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}")


def way_in(line: str) -> str:
    """The address that a printed line is."""
    assert ADDRESS.fullmatch(line.strip()), line
    return line.strip()


@dataclass
class Running:
    """``regard serve`` as a process of its own."""

    process: subprocess.Popen[str]
    printed: str

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A browser that has opened the page."""
        address = way_in(self.printed)
        url = httpx.URL(address)
        base = f"http://{url.host}:{url.port}"
        with httpx.Client(base_url=base, follow_redirects=True, timeout=120) as client:
            client.get(address).raise_for_status()
            yield client

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """The exit code, and what stands on standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def started(path: Path, *options: str) -> Running:
    process = subprocess.Popen(
        [REGARD, "serve", path, "--no-browser", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    return Running(process, process.stdout.readline().strip())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    one = started(saved(tmp_path, 1500))
    yield one
    one.process.kill()
    one.process.communicate()


TILE = "/api/tile?layer=0&head=0&level=0&row={row}&column={column}"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_page_until_it_is_ended(running: Running, number: int) -> None:
    with running.client() as client:
        assert "<title>" in client.get("/").text
        assert client.get("/api/row?layer=0&head=1&query=5").status_code == 200
    assert running.end(number) == (0, "")


@pytest.mark.full
def test_200_clients_at_once_and_some_that_leave_are_answered(running: Running) -> None:
    with running.client() as client:
        leave(client)

        def ask(number: int) -> bytes:
            path = TILE.format(row=number % 5, column=0)
            with httpx.Client(base_url=client.base_url, cookies=client.cookies, timeout=120) as one:
                return one.get(path).raise_for_status().content

        with ThreadPoolExecutor(200) as pool:
            tiles = list(pool.map(ask, range(200)))
        assert tiles[:5] * 40 == tiles
        assert len(set(tiles)) == 5
    assert running.end() == (0, "")


def leave(client: httpx.Client) -> None:
    """Twenty clients that ask for a tile and are gone."""
    host, port = client.base_url.host, client.base_url.port or 80
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    for number in range(20):
        path = TILE.format(row=number % 6, column=number % 5)
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\n\r\n"
        with socket.create_connection((host, port)) as one:
            one.sendall(request.encode())


@pytest.mark.full
def test_ctrl_c_in_the_middle_of_a_long_answer_ends_it(tmp_path: Path) -> None:
    running = started(saved(tmp_path, 20_000))
    with running.client() as client, ThreadPoolExecutor(2) as pool:
        pool.submit(client.get, "/api/column?layer=0&head=0&key=3")
        client.get("/api/tile?layer=0&head=1&level=7&row=0&column=0")
        begun = time.monotonic()
        code, err = running.end()
        assert (code, err) == (0, "")
        assert time.monotonic() - begun < 30  # a second or two on a quiet machine


Served = list[tuple[ASGIApp, str]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What would be served and its address, in the place of serving it."""
    found: Served = []
    printed: list[str] = []
    tell = serve_command._write_address

    def kept(line: str) -> None:
        printed.append(line)
        tell(line)

    monkeypatch.setattr(serve_command, "_write_address", kept)
    monkeypatch.setattr(
        server.uvicorn.Server,
        "run",
        lambda self, **_: found.append((self.config.app, way_in(printed[-1]))),
    )
    return found


@pytest.mark.parametrize("change", ["written again", "removed"])
def test_a_recording_that_has_changed_on_disk_is_told(
    change: str, run: Run, tmp_path: Path, served: Served
) -> None:
    path = saved(tmp_path)
    run("serve", str(path), "--no-browser")
    app, address = served[0]
    with TestClient(app, follow_redirects=True, base_url=address.partition("/?")[0]) as client:
        assert client.get(address).status_code == 200
        if change == "removed":
            path.unlink()
        else:
            saved(tmp_path, 7)
        got = client.get("/api/heads")
    assert got.status_code == 409
    assert got.text == "the recording has changed on disk; start regard serve again."


def test_a_port_that_is_in_use_is_one_clear_sentence(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, out, err = run("serve", str(saved(tmp_path)), "--port", str(port))
    assert (code, out) == (2, "")
    assert err == (
        f"regard: port is {port}, which cannot be listened on: another program uses it.\n"
        "    Leave it out, and a free one is taken.\n"
    )


def test_a_recording_that_is_not_there_is_one_clear_sentence(run: Run) -> None:
    code, out, err = run("serve", "none.safetensors")
    assert (code, out, err) == (2, "", "regard: none.safetensors: No such file or directory.\n")


def test_a_file_that_is_no_recording_is_one_clear_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.safetensors").write_bytes(b"not a recording")
    code, out, err = run("serve", "run.safetensors")
    assert (code, out) == (2, "")
    assert err.startswith("regard: run.safetensors is no recording of regard: ")


def test_a_recording_of_answers_is_one_clear_sentence(run: Run, tmp_path: Path) -> None:
    seen = regard.Recording({})
    seen.add(
        "a", None, answers=[(regard.Entropy(), torch.zeros(2, 5))], shape=torch.Size([2, 5, 5])
    )
    seen.save(tmp_path / "run.safetensors")
    code, out, err = run("serve", "run.safetensors")
    assert (code, out) == (2, "")
    assert err == (
        "regard: run.safetensors has answers only; the page needs query and key.\n"
        "    Record query and key, or ask it with regard heads.\n"
    )


def test_without_starlette_the_command_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("regard.view.server.http_server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("regard.view.server.http_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, out, err = run("serve", "run.safetensors")
    assert (code, out) == (2, "")
    assert err == (
        "regard: serve needs uvicorn, which is not installed.\n    Run: pip install 'regard[cli]'\n"
    )


@pytest.mark.parametrize("opens", [True, False], ids=["browser", "no browser"])
def test_the_browser_opens_a_private_file_that_leads_to_the_address(
    opens: bool, run: Run, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of a machine can read the arguments of a browser."""
    opened: list[tuple[str, int, str]] = []

    def keep(address: str) -> None:
        path = Path(address.removeprefix("file://"))
        mode = path.stat().st_mode | path.parent.stat().st_mode
        opened.append((address, mode & 0o077, path.read_text()))

    monkeypatch.setattr(server.webbrowser, "open", keep)
    code, out, err = run("serve", str(saved(tmp_path)), *([] if opens else ["--no-browser"]))
    assert (code, err) == (0, "")
    address = way_in(out)
    assert len(opened) == opens
    for file, others, text in opened:
        assert (others, address in text, "token" in file) == (0, True, False)
        assert not Path(file.removeprefix("file://")).exists()  # it is gone with the server


def test_the_printed_address_lets_a_browser_in_more_than_once(
    run: Run, tmp_path: Path, served: Served
) -> None:
    run("serve", str(saved(tmp_path)), "--no-browser")
    app, address = served[0]
    for _ in range(2):
        base = address.partition("/?")[0]
        with TestClient(app, follow_redirects=True, base_url=base) as browser:
            assert browser.get("/").status_code == 403
            got = browser.get(address)
            assert (got.status_code, "token" in str(got.url)) == (200, False)


def test_a_recording_without_tokens_names_its_model_once(
    run: Run, tmp_path: Path, served: Served
) -> None:
    run("serve", str(saved(tmp_path)), "--no-browser")
    app, address = served[0]
    base = address.partition("/?")[0]
    with TestClient(app, follow_redirects=True, base_url=base) as browser:
        shown = browser.get(address).text
    assert '"title":"Attention"' in shown
    assert shown.count('"tiny"') == 1


@pytest.mark.full
def test_1200_idle_connections_do_not_keep_a_browser_waiting(tmp_path: Path) -> None:
    running = started(saved(tmp_path))
    address = httpx.URL(way_in(running.printed))
    idle: list[socket.socket] = []
    try:
        for _ in range(1200):
            one = socket.create_connection((address.host, address.port or 80), timeout=60)
            one.sendall(b"GET / HTTP/1.1\r\n")  # and never the rest
            idle.append(one)
        with running.client() as client:
            assert client.get("/api/row?layer=0&head=1&query=5").status_code == 200
    finally:
        for one in idle:
            one.close()
    assert running.end() == (0, "")


@pytest.mark.browser
@pytest.mark.full
def test_the_address_opens_the_page_and_loses_its_token(tmp_path: Path, browser: Browser) -> None:
    running = started(saved(tmp_path))
    page = browser.new_page()
    try:
        page.goto(running.printed)
        page.wait_for_selector("body.ready")
        page.wait_for_selector("#sentence:not(:empty)")
        assert page.url.startswith(running.printed.partition("?")[0])
        assert "token" not in page.url
    finally:
        page.close()
        running.process.terminate()
        running.process.communicate()


def test_a_text_is_read_by_the_model_and_can_be_edited(
    run: Run, bert: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(Pretrained.load(bert).observe("Anna has a boat"))
    trial = Trial({name: {"induction": (1.0,) * 4} for name in names})
    monkeypatch.setattr("regard.models.trials.repetition", lambda *_, **__: [trial])
    code, _, err = run("serve", "Anna has a boat", "-m", bert, "--no-browser")
    assert (code, err) == (0, "")
    app, address = served[0]
    base = address.partition("?")[0].rstrip("/")
    with TestClient(app, follow_redirects=True, base_url=base) as client:
        page = client.get(address).text
        assert '"text":"Anna has a boat","run":0' in page
        assert '"kind":"induction"' in page  # as regard see names it
        got = client.post("/api/text", json={"text": "Ben has"}, headers={"origin": base})
        assert got.json() == {"run": 1}
        row = client.get("/api/row?layer=1&head=0&query=1", headers={"x-run": "1"}).content
    exact = Pretrained.load(bert).observe("Ben has")[1][0, 0, 1]
    values = torch.frombuffer(bytearray(row[: 4 * len(exact)]), dtype=torch.float32)
    torch.testing.assert_close(values, exact)
