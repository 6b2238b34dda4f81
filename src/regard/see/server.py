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
from dataclasses import asdict
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from torch import Tensor

from regard.characters import visible
from regard.errors import RegardError
from regard.loading import load
from regard.recording import Recording
from regard.see.answers import Answers, Gone, Which
from regard.see.asked import Asked
from regard.see.desk import Answer, Busy, Desk
from regard.see.guard import Guard
from regard.see.manifest import live_layers, manifest, told
from regard.see.packing import memory
from regard.see.pyramid import Place
from regard.see.query_steps import KeysAsked
from regard.see.template import filled_template, json_block

__all__ = ["application", "serve"]

MIB = 2**20
_LOOK_AGAIN = 0.1  # seconds
_LEFT = 499  # what nginx calls a client that has closed its request
_MOST_KEYS = 1000
_WRONG = (ValueError, TypeError, IndexError, RegardError)

Wanted = Callable[[], bool]
Question = Callable[[Answers, Asked, Wanted], Answer]


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
        >>> from regard.see.server import application
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
    routes += [route(name, question, quick) for name, question in _QUICK.items()]
    routes += [route(name, question, long) for name, question in _LONG.items()]
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
        >>> from regard.see.server import serve
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


# Questions


def _row(answers: Answers, asked: Asked, wanted: Wanted) -> Answer:
    row = answers.row(_which(asked), asked.whole("query"), wanted=wanted)
    return _bytes(_float32(row.values) + memory(row.mask.to(torch.uint8)))


def _column(answers: Answers, asked: Asked, wanted: Wanted) -> Answer:
    return _bytes(_float32(answers.column(_which(asked), asked.whole("key"), wanted=wanted)))


def _tile(answers: Answers, asked: Asked, wanted: Wanted) -> Answer:
    level, row, column = (asked.whole(name) for name in ("level", "row", "column"))
    place = Place(level, row, column, asked.flag("by_row"))
    tile = answers.tile(_which(asked), place, wanted=wanted)
    height, width = tile.values.shape
    headers = {"X-Height": str(height), "X-Width": str(width), "X-Exact": str(int(tile.exact))}
    if tile.sampled is not None:
        headers["X-Sampled"] = str(tile.sampled)
    content = _float32(tile.values)
    return Answer(content, "application/octet-stream", headers, final=tile.exact)


def _progress(answers: Answers, asked: Asked, _: Wanted) -> Answer:
    asked.flag("by_row")  # one pass serves both
    return _json(asdict(answers.progress(_which(asked))), final=False)


def _steps(answers: Answers, asked: Asked, _: Wanted) -> Answer:
    by = asked.one_of("by", ("weight", "position"))
    keys = KeysAsked(by, asked.whole("start"), asked.whole("count", most=_MOST_KEYS))
    return _json(asdict(answers.steps(_which(asked), asked.whole("query"), keys)))


def _segments(answers: Answers, asked: Asked, _: Wanted) -> Answer:
    shares = answers.segments(_which(asked), asked.spans("queries"), asked.spans("keys"))
    return _bytes(_float32(shares))


def _overview(answers: Answers, asked: Asked, _: Wanted) -> Answer:
    return _json({"overview": answers.overview(asked.whole("layer"))})


def _heads(answers: Answers, _: Asked, __: Wanted) -> Answer:
    return _json({"heads": told(answers.heads())})


_QUICK: dict[str, Question] = {
    "row": _row,
    "column": _column,
    "tile": _tile,
    "progress": _progress,
    "steps": _steps,
}
_LONG: dict[str, Question] = {"segments": _segments, "overview": _overview, "heads": _heads}


def _which(asked: Asked) -> Which:
    return Which(asked.whole("layer"), asked.whole("head"), asked.flag("hidden"))


def _float32(values: Tensor) -> bytes:
    return memory(values.float())


def _bytes(content: bytes) -> Answer:
    return Answer(content, "application/octet-stream", final=True)


def _json(value: object, *, final: bool = True) -> Answer:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Answer(text.encode(), "application/json", final=final)


# One request


async def _endpoint(answers: Answers, desk: Desk, question: Question, request: Request) -> Response:
    asked = Asked(request.query_params)
    answering = asyncio.ensure_future(_answer(answers, desk, question, asked, request))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=_LEFT)
        answer = answering.result()
        return Response(answer.content, headers=answer.headers, media_type=answer.kind)
    except _WRONG as error:
        return PlainTextResponse(str(error).partition("\n")[0], 400)
    except Busy:
        return PlainTextResponse("too much is asked at once; ask again in a moment.", 503)
    except (Gone, asyncio.CancelledError):
        return Response(status_code=_LEFT)
    finally:
        answering.cancel()
        leaving.cancel()


async def _answer(
    answers: Answers, desk: Desk, question: Question, asked: Asked, request: Request
) -> Answer:
    if question is _column:
        await _until_rows_are_known(answers, desk, asked)
    key = (request.url.path, asked.key)
    return await desk.ask(key, lambda wanted: question(answers, asked, wanted))


async def _until_rows_are_known(answers: Answers, desk: Desk, asked: Asked) -> None:
    """Waits here and not in a thread, of which there are few."""
    key = ("waits", _which(asked))
    while True:
        answer = await desk.ask(key, lambda wanted: _progress(answers, asked, wanted))
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
