"""Access to the server: only its own page, on this machine, with the token.

A web page from elsewhere can send requests to this machine, under any name that its DNS gives it
(rebinding) or as an image's address. None of them passes here.
"""

from collections.abc import Callable
from hmac import compare_digest
from secrets import token_urlsafe

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """An ASGI application before another one.

    Args:
        app: that is guarded.
        accepts: returns True for the token that the first request must bring.

    Example:
        >>> from starlette.responses import PlainTextResponse
        >>> from regard.view.server.access_guard import Guard
        >>> guarded = Guard(PlainTextResponse("numbers"), lambda token: token == "secret")
    """

    def __init__(self, app: ASGIApp, accepts: Callable[[str], bool]) -> None:
        self._app = app
        self._accepts = accepts
        self._secret = token_urlsafe(32)  # what the cookie remembers, never the token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: refused, or handed on, with the same headers either way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host = headers.get("host", "")
        name, _, port = (
            host.rpartition(":") if host.rpartition(":")[2].isdigit() else (host, "", "")
        )
        if name not in _NAMES:
            return _text(403, "this server answers to 127.0.0.1 and localhost only.")
        # A browser names the origin of every POST.
        is_stranger = request.method != "GET" and "origin" not in headers
        if is_stranger or not _is_own_page(headers, host):
            return _text(403, "another page asks; this server answers its own page only.")
        cookie = f"regard-{port or 80}"  # two servers on one machine share their cookies
        given = request.query_params.get("token")
        if request.url.path == "/" and given is not None and self._accepts(given):
            answer = RedirectResponse("/", status_code=303)
            # Not "strict": the launch file is another site, and the redirect would lack the cookie.
            answer.set_cookie(cookie, self._secret, path="/", httponly=True, samesite="lax")
            return answer
        if not compare_digest(request.cookies.get(cookie, "").encode(), self._secret.encode()):
            return _text(403, "the token is missing or was used; open the file that was printed.")
        return None


def _is_own_page(headers: Headers, host: str) -> bool:
    """Return True if the request comes from the page itself, or from no browser."""
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return False
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in (None, "none", "same-origin") or mode == "navigate"


def _text(status: int, sentence: str) -> Response:
    return PlainTextResponse(sentence, status)
