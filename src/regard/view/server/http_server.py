"""The pages of recordings over HTTP, for this machine alone, computed as they are looked at.

``/`` is the page of one recording; of several it lists them, and each has its page under its
number, ``/1/``. A page asks ``/api/row``, ``/api/column``, ``/api/tile``, ``/api/progress``,
``/api/steps``, ``/api/segments`` and ``/api/heads``. Numbers come as little-endian float32, what
has a structure as JSON, and what is wrong as one sentence of text.

If the server has the model, a page can also post another text to ``/api/text``.
"""

import asyncio
import json
import os
import socket
import threading
import webbrowser
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from hmac import compare_digest
from html import escape
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from regard.errors import RegardError
from regard.models.pretrained import check_text
from regard.recording.file_reader import load
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.view.export.page_template import digest, filled_template, json_block
from regard.view.server.access_guard import Guard
from regard.view.server.connection_limits import LimitedProtocol
from regard.view.server.launch_file import LaunchFile
from regard.view.tiles.manifest import PageLayer, add_other, head_records, live_layers, manifest
from regard.view.tiles.packing import memory
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.page_questions import QUESTIONS, WRONG, Answer, Question, Threads

__all__ = ["Read", "application", "serve", "serve_text"]

_AT_ONCE = 2**24  # weights whose kinds of heads take a moment
_LEFT = 499  # what nginx calls a client that has closed its request
_MOST_BYTES = 16 * 2**20  # of a posted text

Read = Callable[[str, Callable[[int, int | None], None]], Recording]
"""Runs a model on a text; reports the layers that have run, and the layers in all if known."""


def application(
    recording: Recording,
    token: str,
    *,
    title: str = "Attention",
    changed: Callable[[], bool] = lambda: False,
    text: str = "",
    read: "Read | None" = None,
) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        recording: what was seen; each of its layers with query and key.
        token: the first request brings it, as ``/?token=...``; a cookie lets later ones in.
        title: what stands at the top of the page.
        changed: whether the recording is another one by now; nothing is answered then.
        text: that the model read.
        read: runs the model on another text; without it the text cannot be edited.

    Raises:
        RegardError: a layer has answers only.
    """
    served = _Served(recording, title, changed, text, read)
    return _application([served], lambda given: compare_digest(given.encode(), token.encode()))


def _application(served: Sequence["_Served"], accepts: Callable[[str], bool]) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            for one in served:
                await one.close()

    if len(served) == 1:
        routes: list[BaseRoute] = list(served[0].routes)
    else:
        routes = [Route("/", _list(served), methods=["GET"])]
        routes += [
            Mount(f"/{number}", routes=one.routes) for number, one in enumerate(served, start=1)
        ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, accepts=accepts)],
        exception_handlers={HTTPException: _no_such_thing, Exception: _went_wrong},
        lifespan=lifespan,
    )


class _Served:
    """One recording: its page, and who answers what the page asks.

    Args:
        recording: what was seen.
        title: what stands at the top of the page.
        changed: whether the recording is another one by now.
        text: that the model read.
        read: runs the model on another text.
        beside: a second recording, which the page shows side by side with this one.
    """

    def __init__(
        self,
        recording: Recording,
        title: str,
        changed: Callable[[], bool] = lambda: False,
        text: str = "",
        read: Read | None = None,
        beside: "_Served | None" = None,
    ) -> None:
        self.title = title
        self.is_changed = changed
        self._beside = beside
        self._read = read
        self._threads = Threads()
        self._runs = 0
        self._running = self._closed = False
        self._layers: tuple[int, int | None] = 0, None
        self._show(recording, text)
        self.routes = [Route("/", self._index, methods=["GET"])]
        self.routes += [
            Route(f"/api/{name}", partial(self._ask, question), methods=["GET"])
            for name, question in QUESTIONS.items()
        ]
        if read is not None:
            self.routes += [
                Route("/api/text", self._progress, methods=["GET"]),
                Route("/api/text", self._post, methods=["POST"]),
            ]

    def _show(self, recording: Recording, text: str) -> None:
        both = [recording] if self._beside is None else [recording, self._beside.recording]
        answers = Answers(*both)
        layers = _known_at_once(both, answers)
        first = manifest(recording, layers[: len(recording)], title=self.title)
        if self._beside is not None:
            more = layers[len(recording) :]
            add_other(first, manifest(self._beside.recording, more, title=self._beside.title))
        if self._read is not None:
            first |= {"text": text, "run": self._runs}
        self._page = "".join(filled_template([json_block("recording", first)], connects="'self'"))
        self.recording, self._answers = recording, answers

    def about(self) -> str:
        """Return what stands beside its title in a list."""
        if self._beside is not None:
            return f"side by side with {self._beside.title}"
        shape = next(iter(self.recording.shapes.values()))
        heads = shape[-3] if len(shape) > 2 else 1
        size = f"{shape[-1]:,} tokens · {len(self.recording.shapes)} layers × {heads} heads"
        return f"{visible(self.recording.model)} · {size}"

    async def close(self) -> None:
        self._closed = True
        self._threads.close()
        await asyncio.to_thread(self._answers.close)

    async def _index(self, _: Request) -> Response:
        return self._refusal() or HTMLResponse(self._page)

    async def _ask(self, question: Question, request: Request) -> Response:
        run = request.headers.get("x-run")
        if self._read is not None and run != str(self._runs):
            return PlainTextResponse(
                "the text was edited in another window; reload this page.", 409
            )
        # The answers of this run: the text may be edited before a thread is free.
        answers, threads = self._answers, self._threads
        return self._refusal() or await _answer(question, answers, threads, request)

    def _refusal(self) -> Response | None:
        if not (self.is_changed() or (self._beside is not None and self._beside.is_changed())):
            return None
        return PlainTextResponse(
            "the recording has changed on disk; start regard serve again.", 409
        )

    async def _progress(self, _: Request) -> Response:
        done, layers = self._layers
        return JSONResponse({"running": self._running, "done": done, "layers": layers})

    async def _post(self, request: Request) -> Response:
        """Run the model on another text."""
        try:
            text = await _posted_text(request)
            if self._running:
                return PlainTextResponse("the model is running; wait until it is done.", 409)
            self._running, self._layers = True, (0, None)
            try:
                await asyncio.to_thread(self._run, text)
            finally:
                self._running = False
        except WRONG as error:
            return PlainTextResponse(str(error).partition("\n")[0], 400)
        except Gone:
            return Response(status_code=_LEFT)
        return JSONResponse({"run": self._runs})

    def _run(self, text: str) -> None:
        def tell(done: int, layers: int | None) -> None:
            if self._closed:
                raise Gone
            self._layers = done, layers

        assert self._read is not None
        recording, before = self._read(text, tell), self._answers
        self._runs += 1
        self._show(recording, text)
        before.close()


async def _posted_text(request: Request) -> str:
    """Return the text of a request, ``{"text": "Life is short"}``.

    Raises:
        ValueError: it is something else, or longer than any model reads.
    """
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit() or int(length) > _MOST_BYTES:
        raise ValueError(f"the text is too long; it must have less than {_MOST_BYTES >> 20} MiB.")
    is_json = request.headers.get("content-type", "").partition(";")[0] == "application/json"
    try:
        text = json.loads(await request.body())["text"] if is_json else None
    except (ValueError, TypeError, LookupError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError("the request has no text; it must be JSON with a text.")
    return check_text(text)


def _known_at_once(recordings: Sequence[Recording], answers: Answers) -> list[PageLayer]:
    """Return the layers; of short recordings with what opens the page on the right head."""
    layers = [layer for recording in recordings for layer in live_layers(recording)]
    if sum(layer.num_heads * layer.q_len * layer.kv_len for layer in layers) > _AT_ONCE:
        return layers
    kinds = head_records(answers.heads())
    for place, layer in enumerate(layers):
        layer.overview = answers.overview(place)
        layer.heads, kinds = kinds[: layer.num_heads], kinds[layer.num_heads :]
    return layers


def _list(served: Sequence[_Served]) -> Response:
    """Return the page that lists several recordings."""
    rows = "".join(
        f'<li><a href="/{number}/">{escape(one.title)}</a> {escape(one.about())}</li>'
        for number, one in enumerate(served, start=1)
    )
    return HTMLResponse(_LIST.format(digest=digest(_LIST_STYLE), style=_LIST_STYLE, rows=rows))


_LIST_STYLE = (
    ":root{color-scheme:light dark}"
    "body{max-width:70ch;margin:3rem auto;padding:0 1rem;font:16px/1.6 system-ui,sans-serif}"
    "ol{padding:0;list-style:none}li{padding:.6rem 0;opacity:.85}a{font-weight:600}"
)
_LIST = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Recordings · regard</title>
<style>{style}</style>
<h1>Recordings</h1>
<ol>{rows}</ol>
</html>
"""


def serve(
    paths: Sequence[str | os.PathLike[str]],
    *,
    port: int | None = None,
    open_browser: bool = True,
    tell: Callable[[str], object] = print,
) -> None:
    """Serve the pages of recordings until Ctrl-C.

    Args:
        paths: of the recordings.
        port: where to listen; any free one for None.
        open_browser: whether to open the page.
        tell: called with the place of the file that opens the page, and the server's address.

    Raises:
        FileNotFoundError: there is no such file.
        RegardError: it is no recording, or has answers only.
        ValueError: there is no path, or the port is in use or none that this user may have.
    """
    if not paths:
        raise ValueError("paths is empty; there must be one recording at least.")
    served = [_opened(Path(path), several=len(paths) > 1) for path in paths]
    if len(served) == 2:
        one, two = served
        served.append(_Served(one.recording, one.title, one.is_changed, beside=two))
    _serve(served, port, open_browser, tell)


def serve_text(
    recording: Recording,
    text: str,
    read: Read,
    *,
    port: int | None = None,
    open_browser: bool = True,
    tell: Callable[[str], object] = print,
) -> None:
    """Serve the page of a text until Ctrl-C; the text can be edited there.

    Args:
        recording: of the text.
        text: that the model read.
        read: runs the model on another text.
        port: as in ``serve``, like the others.
        open_browser: whether to open the page.
        tell: called with the address.
    """
    title = visible(recording.model) or "Attention"
    _serve([_Served(recording, title, text=text, read=read)], port, open_browser, tell)


def _serve(
    served: Sequence[_Served],
    port: int | None,
    open_browser: bool,
    tell: Callable[[str], object],
) -> None:
    with _listening(port) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with LaunchFile(address) as launch:
            tell(f"{launch.path}   opens {address} in a browser")
            if open_browser:
                webbrowser.open(launch.path.as_uri())
            config = uvicorn.Config(
                _application(served, launch.accepts),
                http=LimitedProtocol,
                access_log=False,
                log_config=None,
                log_level="critical",  # Ctrl-C in the middle of an answer is no error
                server_header=False,
                timeout_graceful_shutdown=1,
                ws="none",
            )
            with suppress(KeyboardInterrupt):  # that is how it is ended
                uvicorn.Server(config).run(sockets=[listener])


def _opened(path: Path, *, several: bool) -> _Served:
    seen = load(path)
    found = _identity(path)
    whole = seen.part([layer.name for layer in seen.layers if layer.matrix is not None])
    if not whole:
        raise RegardError(
            f"{path} has answers only; the page needs query and key.\n"
            "    Record query and key, or ask it with regard heads."
        )
    title = path.name if several else visible(seen.model) or path.name
    return _Served(whole, title, partial(_is_another, path, found))


def _listening(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port or 0))
    except (OSError, OverflowError) as error:
        used = isinstance(error, OSError) and error.errno == EADDRINUSE
        why = "another program uses it" if used else str(getattr(error, "strerror", None) or error)
        raise ValueError(
            f"port is {port}, which cannot be listened on: {why}.\n"
            "    Leave it out, and a free one is taken."
        ) from error


def _identity(path: Path) -> tuple[int, ...]:
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _is_another(path: Path, found: tuple[int, ...]) -> bool:
    try:
        return _identity(path) != found
    except OSError:
        return True


def _sent(answer: Answer) -> Response:
    """Arrays one after the other, with what they are in headers; what has none as JSON."""
    if not answer.arrays:
        text = json.dumps(answer.content, allow_nan=False, separators=(",", ":"))
        return Response(text, media_type="application/json")
    known = {name: value for name, value in answer.content.items() if value is not None}
    headers = {f"X-{name.title()}": str(int(value)) for name, value in known.items()}
    content = b"".join(memory(array) for array in answer.arrays)
    return Response(content, headers=headers, media_type="application/octet-stream")


async def _answer(
    question: Question, answers: Answers, threads: Threads, request: Request
) -> Response:
    gone = threading.Event()

    def work() -> Response:
        return _sent(question.answer(answers, request.query_params, lambda: not gone.is_set()))

    answering = asyncio.wrap_future(threads.submit(question, work))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=_LEFT)
    except WRONG as error:
        return PlainTextResponse(str(error).partition("\n")[0], 400)
    except (Gone, asyncio.CancelledError):
        return Response(status_code=_LEFT)
    finally:
        gone.set()
        answering.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_such_thing(_: Request, error: Exception) -> Response:
    status = cast(Any, error).status_code
    sentence = "there is nothing at this address." if status == 404 else "only GET is answered."
    return PlainTextResponse(sentence, status)


async def _went_wrong(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"regard could not answer: {type(error).__name__}: {error}", 500)
