"""The page of a recording over HTTP, for this machine alone, computed as it is looked at.

``/`` is the page. It asks ``/api/row``, ``/api/column``, ``/api/tile``, ``/api/progress``,
``/api/steps``, ``/api/segments``, ``/api/overview`` and ``/api/heads``. Numbers come as
little-endian float32, what has a structure as JSON, and what is wrong as one sentence of text.

If the server has the model, the page can also post another text to ``/api/text``.

A web page from elsewhere can send requests to this machine, under any name that its DNS gives it
(rebinding) or as an image's address. Starlette checks the name, and ``_guard`` the rest: only the
page itself is answered, with the cookie that it got for the token in its address.
"""

import asyncio
import json
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from regard.errors import RegardError
from regard.models.pretrained import check_text
from regard.recording.recording import Recording
from regard.view.export.page_template import filled_template
from regard.view.tiles.head_tiles import WrongQuestionError
from regard.view.tiles.manifest import head_records, live_layers, manifest
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.page_opening import blind_opening, openings
from regard.view.tiles.page_questions import answered
from regard.view.tiles.protocol import QUESTIONS

_AT_ONCE = 2**24  # weights whose kinds of heads take a moment
_LEFT = 499  # what nginx calls a client that has closed its request
_SENTENCES = {404: "there is nothing at this address.", 405: "only GET is answered."}
_MOST_BYTES = 16 * 2**20  # of a posted text
_MOST_CONNECTIONS = 4096  # a browser has six to one server
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LAUNCH = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>regard</title>
<p>This file opens the page of regard serve. <a href="{address}">Open it</a></p>
"""

Read = Callable[[str, Callable[[int, int | None], None]], Recording]
"""Runs a model on a text; reports the layers that have run, and the layers in all if known."""


def _never() -> bool:
    return False


def application(
    recording: Recording,
    token: str,
    *,
    changed: Callable[[], bool] = _never,
    text: str = "",
    read: "Read | None" = None,
) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        recording: what was seen; each of its layers with query and key.
        token: a first request brings it, as ``/?token=...``; a cookie lets later ones in.
        changed: whether the recording is another one by now; nothing is answered then.
        text: that the model read.
        read: runs the model on another text; without it the text cannot be edited.

    Raises:
        RegardError: a layer has answers only.
    """
    served = _Served(recording, changed, text, read)
    hosts = ["127.0.0.1", "localhost"]
    return Starlette(
        routes=served.routes,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_guard(token)),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        ],
        exception_handlers={
            HTTPException: _refused,
            RegardError: _sentence,
            Gone: _has_left,
            Exception: _went_wrong,
        },
        lifespan=served.lifespan,
    )


def _guard(token: str) -> Callable[[Request, RequestResponseEndpoint], Awaitable[Response]]:
    """Return what asks for its own page alone: a request is refused, or handed on."""
    secret = token_urlsafe(32)  # what the cookie remembers, never the token

    async def guarded(request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = _refusal(token.encode(), secret, request) or await call_next(request)
        answer.headers.update(_HEADERS)
        return answer

    return guarded


def _refusal(token: bytes, secret: str, request: Request) -> Response | None:
    host = request.headers.get("host", "")
    # A browser names the origin of every POST.
    is_stranger = request.method != "GET" and "origin" not in request.headers
    if is_stranger or not _is_own_page(request.headers, host):
        return PlainTextResponse("another page asks; this server answers its own page only.", 403)
    # Two servers on one machine share their cookies.
    cookie = f"regard-{host.rpartition(':')[2] if ':' in host else 80}"
    given = request.query_params.get("token", "").encode()
    if request.url.path == "/" and compare_digest(given, token):
        answer = RedirectResponse("/", status_code=303)
        # Not "strict": the launch file is another site, and the redirect would lack the cookie.
        answer.set_cookie(cookie, secret, path="/", httponly=True, samesite="lax")
        return answer
    if not compare_digest(request.cookies.get(cookie, "").encode(), secret.encode()):
        return PlainTextResponse(
            "the token is missing or wrong; open the address that was printed.", 403
        )
    return None


def _is_own_page(headers: Headers, host: str) -> bool:
    """Return True if the request comes from the page itself, or from no browser."""
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return False
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in (None, "none", "same-origin") or mode == "navigate"


class _Served:
    """One recording: its page, and who answers what the page asks.

    Args:
        recording: what was seen.
        changed: whether the recording is another one by now.
        text: that the model read.
        read: runs the model on another text.
    """

    def __init__(
        self,
        recording: Recording,
        changed: Callable[[], bool],
        text: str,
        read: Read | None,
    ) -> None:
        self._is_changed = changed
        self._read = read
        self._runs = 0
        self._running = self._closed = False
        self._layers: tuple[int, int | None] = 0, None
        self._show(recording, text)
        self.routes = [Route("/", self._index, methods=["GET"])]
        self.routes += [
            Route(f"/api/{kind}", partial(self._ask, kind), methods=["GET"]) for kind in QUESTIONS
        ]
        if read is not None:
            self.routes += [
                Route("/api/text", self._progress, methods=["GET"]),
                Route("/api/text", self._post, methods=["POST"]),
            ]

    def _show(self, recording: Recording, text: str) -> None:
        recording = recording.apart()
        answers = Answers(recording)
        layers = live_layers(recording)
        opened, notable = blind_opening(recording), []
        if sum(layer.num_heads * layer.q_len * layer.kv_len for layer in layers) <= _AT_ONCE:
            kinds = answers.kinds()
            for place, layer in enumerate(layers):
                layer.overview = answers.overview(place)
                layer.heads = head_records(kinds[place])
            opened, notable = openings(recording, kinds)
        first = manifest(recording, layers, opened=opened, notable=notable)
        if self._read is not None:
            first |= {"text": text, "run": self._runs}
        self._page = "".join(filled_template(first, connects="'self'"))
        self._answers = answers

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        """End all answers with the server."""
        try:
            yield
        finally:
            self._closed = True
            self._answers.close()

    async def _index(self, _: Request) -> Response:
        self._check_unchanged()
        return HTMLResponse(self._page)

    async def _ask(self, kind: str, request: Request) -> Response:
        run = request.headers.get("x-run")
        if self._read is not None and run != str(self._runs):
            raise HTTPException(409, "the text was edited in another window; reload this page.")
        self._check_unchanged()
        # The answers of this run: the text may be edited before a thread is free.
        return await _answer(kind, self._answers, request)

    def _check_unchanged(self) -> None:
        if self._is_changed():
            raise HTTPException(409, "the recording has changed on disk; start regard serve again.")

    async def _progress(self, _: Request) -> Response:
        done, layers = self._layers
        return JSONResponse({"running": self._running, "done": done, "layers": layers})

    async def _post(self, request: Request) -> Response:
        """Run the model on another text."""
        text = await _posted_text(request)
        if self._running:
            raise HTTPException(409, "the model is running; wait until it is done.")
        self._running, self._layers = True, (0, None)
        try:
            await run_in_threadpool(self._run, text)
        finally:
            self._running = False
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
        WrongQuestionError: it is something else, or longer than any model reads.
    """
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit() or int(length) > _MOST_BYTES:
        raise WrongQuestionError(
            f"the text is too long; it must have less than {_MOST_BYTES >> 20} MiB."
        )
    is_json = request.headers.get("content-type", "").partition(";")[0] == "application/json"
    try:
        text = json.loads(await request.body())["text"] if is_json else None
    except (ValueError, TypeError, LookupError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise WrongQuestionError("the request has no text; it must be JSON with a text.")
    try:
        return check_text(text)
    except ValueError as error:
        raise WrongQuestionError(str(error)) from error


def serve(
    recording: Recording,
    *,
    path: Path | None = None,
    text: str = "",
    read: Read | None = None,
    port: int | None = None,
    open_browser: bool = True,
    tell: Callable[[str], object] = print,
) -> None:
    """Serve the page of a recording until Ctrl-C.

    Args:
        recording: of a file or of a text.
        path: of the file; once it is another one, the page gets no more answers.
        text: that the model read.
        read: runs the model on another text; the text can then be edited on the page.
        port: where to listen; any free one for None.
        open_browser: whether to open the page.
        tell: called with the address, which has the token.

    Raises:
        RegardError: the recording has answers only.
        ValueError: the port is in use or none that this user may have.
    """
    changed: Callable[[], bool] = _never
    if path is not None:
        recording = recording.part([one.name for one in recording.layers if one.matrix is not None])
        if not recording:
            raise RegardError(
                f"{path} has answers only; the page needs query and key.\n"
                "    Record query and key, or ask it with regard heads."
            )
        changed = partial(_is_another, path, _identity(path))
    token = token_urlsafe(32)
    with _listening(port) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
        _allow_files(2 * _MOST_CONNECTIONS)
        config = uvicorn.Config(
            application(recording, token, changed=changed, text=text, read=read),
            access_log=False,
            limit_concurrency=_MOST_CONNECTIONS,
            log_config=None,
            log_level="critical",  # Ctrl-C in the middle of an answer is no error
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        tell(address)
        with _launch_file(address) as launch, suppress(KeyboardInterrupt):  # that ends it
            if open_browser:
                webbrowser.open(launch.as_uri())
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _launch_file(address: str) -> Generator[Path]:
    """Yield an HTML file that leads to an address.

    Other users of this machine can read the arguments of a browser, but not this file.
    """
    with TemporaryDirectory(prefix="regard-serve-") as folder:  # of mode 700
        path = Path(folder) / "open.html"
        path.write_text(_LAUNCH.format(address=address), encoding="utf-8")
        path.chmod(0o600)
        yield path


def _allow_files(count: int) -> None:
    """Allow so many open files, as far as the system lets this process have them.

    Idle connections then cannot keep others from being accepted.
    """
    if sys.platform == "win32":  # it has no such limit
        return
    import resource

    with suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


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


def _sent(content: dict[str, Any], arrays: list[bytes]) -> Response:
    """Arrays one after the other, with what they are in headers; what has none as JSON."""
    if not arrays:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        return Response(text, media_type="application/json")
    known = {name: value for name, value in content.items() if value is not None}
    headers = {f"X-{name.title()}": str(int(value)) for name, value in known.items()}
    return Response(b"".join(arrays), headers=headers, media_type="application/octet-stream")


async def _answer(kind: str, answers: Answers, request: Request) -> Response:
    gone = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watching = asyncio.ensure_future(watch())
    how = kind, request.query_params, answers, lambda: not gone.is_set()
    try:
        return _sent(*await run_in_threadpool(answered, *how))
    finally:
        gone.set()
        watching.cancel()


async def _refused(_: Request, error: Exception) -> Response:
    status, sentence = cast(Any, error).status_code, cast(Any, error).detail
    return PlainTextResponse(_SENTENCES.get(status, sentence), status)


async def _sentence(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error).partition("\n")[0], 400)


async def _has_left(_: Request, __: Exception) -> Response:
    return Response(status_code=_LEFT)


async def _went_wrong(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"regard could not answer: {type(error).__name__}: {error}", 500)
