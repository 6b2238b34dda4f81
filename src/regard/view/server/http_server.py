"""The page of a recording over HTTP, for this machine alone, computed as it is looked at.

``/`` is the page. It asks ``/api/row``, ``/api/column``, ``/api/tile``, ``/api/progress``,
``/api/steps``, ``/api/segments`` and ``/api/heads``. Numbers come as little-endian float32, what
has a structure as JSON, and what is wrong as one sentence of text.
"""

import asyncio
import json
import os
import secrets
import socket
import webbrowser
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from regard.errors import RegardError
from regard.recording.loading import load
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.view.export.page_template import filled_template, json_block
from regard.view.server.access_guard import Guard
from regard.view.server.request_queue import Answer, Busy, Desk
from regard.view.tiles.manifest import live_layers, manifest
from regard.view.tiles.packing import memory
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.page_questions import QUESTIONS, WRONG, Question, Told
from regard.view.tiles.request_parsing import Asked

__all__ = ["application", "serve"]

MIB = 2**20
_LOOK_AGAIN = 0.1  # seconds
_LEFT = 499  # what nginx calls a client that has closed its request


def application(
    recording: Recording,
    token: str,
    *,
    title: str = "Attention",
    changed: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The server as an ASGI application.

    Args:
        recording: what was seen; each of its layers with query and key.
        token: the first request brings it, as ``/?token=...``; a cookie remembers it.
        title: what stands at the top of the page.
        changed: whether the recording is another one by now; nothing is answered then.

    Raises:
        RegardError: a layer has answers only.

    Example:
        >>> import torch, regard
        >>> from regard.view.server.http_server import application
        >>> even = regard.attend(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
        >>> app = application(regard.Recording({"layer": even}), token="secret")
    """
    answers = Answers(recording)
    quick, long = Desk(threads=2, room=128 * MIB), Desk(threads=2, room=8 * MIB)
    first = manifest(recording, live_layers(recording), title=title)
    page = "".join(filled_template([json_block("recording", first)], connects="'self'"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            for desk in (quick, long):
                desk.close()
            await asyncio.to_thread(answers.close)

    async def index(_: Request) -> Response:
        return HTMLResponse(page)

    def route(name: str, question: Question, desk: Desk) -> Route:
        return Route(f"/api/{name}", partial(_endpoint, answers, desk, question), methods=["GET"])

    routes = [Route("/", index, methods=["GET"])]
    routes += [
        route(name, question, long if question.long else quick)
        for name, question in QUESTIONS.items()
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token, changed=changed)],
        exception_handlers={HTTPException: _no_such_thing, Exception: _went_wrong},
        lifespan=lifespan,
    )


def serve(
    path: str | os.PathLike[str],
    *,
    port: int | None = None,
    open_browser: bool = True,
    tell: Callable[[str], object] = print,
) -> None:
    """Serves the page of a recording until Ctrl-C.

    Args:
        path: of the recording.
        port: where to listen; any free one for None.
        open_browser: whether to open the page.
        tell: is given the page's address, once it can be opened.

    Raises:
        FileNotFoundError: there is no such file.
        RegardError: it is no recording, or has answers only.
        ValueError: the port is in use, or none that this user may have.

    Example:
        >>> from regard.view.server.http_server import serve
        >>> serve("nothing.safetensors")
        Traceback (most recent call last):
        FileNotFoundError: there is no file nothing.safetensors; ...
    """
    path = Path(path)
    seen = load(path)
    found = _identity(path)
    whole = seen.part([layer.name for layer in seen.layers if layer.matrix is not None])
    if not whole:
        raise RegardError(
            f"{path} has answers only; the page needs query and key.\n"
            "    Record again without --answers, or ask it with regard heads."
        )
    token = secrets.token_urlsafe(32)
    with _listening(port) as listener:
        title = visible(seen.model) or path.name
        changed = partial(_is_another, path, found)
        app = application(whole, token, title=title, changed=changed)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
        tell(address)
        if open_browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="critical",  # Ctrl-C in the middle of an answer is no error
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        with suppress(KeyboardInterrupt):  # that is how it is ended
            uvicorn.Server(config).run(sockets=[listener])


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


def _sent(told: Told) -> Answer:
    """Arrays one after the other, with what they are in headers; what has none as JSON."""
    if not told.arrays:
        text = json.dumps(told.content, allow_nan=False, separators=(",", ":"))
        return Answer(text.encode(), "application/json", final=told.final)
    known = {name: value for name, value in told.content.items() if value is not None}
    headers = {f"X-{name.title()}": str(int(value)) for name, value in known.items()}
    content = b"".join(memory(array) for array in told.arrays)
    return Answer(content, "application/octet-stream", headers, final=told.final)


# One request


async def _endpoint(answers: Answers, desk: Desk, question: Question, request: Request) -> Response:
    answering = asyncio.ensure_future(_answer(answers, desk, question, request))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=_LEFT)
        answer = answering.result()
        return Response(answer.content, headers=answer.headers, media_type=answer.kind)
    except WRONG as error:
        return PlainTextResponse(str(error).partition("\n")[0], 400)
    except Busy:
        return PlainTextResponse("too much is asked at once; ask again in a moment.", 503)
    except (Gone, asyncio.CancelledError):
        return Response(status_code=_LEFT)
    finally:
        answering.cancel()
        leaving.cancel()


async def _answer(answers: Answers, desk: Desk, question: Question, request: Request) -> Answer:
    asked = question.asked(request.query_params)
    key = (request.url.path, asked.key)

    def work(wanted: Callable[[], bool]) -> Answer:
        return _sent(question.answer(answers, asked, wanted))

    if question.waits:
        with suppress(Gone):  # what asks for what is not there is told so at once
            return await desk.ask(("at once", key), lambda _: work(lambda: False))
        await _until_rows_are_known(answers, desk, asked)
    return await desk.ask(key, work)


async def _until_rows_are_known(answers: Answers, desk: Desk, asked: Asked) -> None:
    """Waits here and not in a thread, of which there are few."""
    of_head = asked.only("layer", "head", "hidden")
    progress = QUESTIONS["progress"]
    while True:
        answer = await desk.ask(
            ("waits", of_head.key), lambda wanted: _sent(progress.answer(answers, of_head, wanted))
        )
        if json.loads(answer.content)["done"] == 1:
            return
        await asyncio.sleep(_LOOK_AGAIN)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_such_thing(_: Request, error: Exception) -> Response:
    status = cast(Any, error).status_code
    sentence = "there is nothing at this address." if status == 404 else "only GET is answered."
    return PlainTextResponse(sentence, status)


async def _went_wrong(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"regard could not answer: {type(error).__name__}: {error}", 500)
