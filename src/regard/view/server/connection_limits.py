"""Limits on connections, so that idle ones cannot keep others from being answered."""

import asyncio
import time
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["LimitedProtocol"]

_SECONDS_FOR_HEADERS = 10.0
_MOST_CONNECTIONS = 256  # a browser has six to one server


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for the headers of a request and a limit on open connections.

    A connection that sends no complete request within 10 seconds is closed. Of more than 256
    connections the one that has been idle longest is closed.
    """

    _deadline: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; close the one that has been idle longest if there are too many."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._watch()
        if len(self.connections) > _MOST_CONNECTIONS:
            others = cast(list[LimitedProtocol], list(self.connections))
            idle = [other for other in others if other.is_idle() and other is not self]
            if idle:
                min(idle, key=lambda other: other._idle_since).close()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; bytes that complete none do not move the deadline."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watching()
        super().connection_lost(exc)

    def is_idle(self) -> bool:
        """Return True if no request is being answered."""
        cycle = cast(Any, self.cycle)
        return cycle is None or bool(cycle.response_complete)

    def close(self) -> None:
        """Close the connection at once."""
        self._stop_watching()
        self.transport.abort()

    def _watch(self) -> None:
        if not self.is_idle():
            self._stop_watching()
        elif self._deadline is None:
            self._idle_since = time.monotonic()
            self._deadline = self.loop.call_later(_SECONDS_FOR_HEADERS, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        if self.is_idle():
            self.close()

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
