"""Who is served when: the newest question first, a few at a time, each computed once.

What nobody waits for any more is not computed, or no further; what was computed is kept for the
next who asks, as far as there is room.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

__all__ = ["Answer", "Busy", "Desk", "Work"]

_MOST_WAITING = 2000


class Busy(Exception):
    """More is asked than will be answered in any useful time."""


@dataclass(frozen=True)
class Answer:
    """What goes back to the browser.

    Attributes:
        content: the bytes.
        kind: of content, as MIME names it.
        headers: besides.
        final: whether the same question has this answer for ever.
    """

    content: bytes
    kind: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    final: bool = False


Work = Callable[[Callable[[], bool]], Answer]
"""Computes an answer; it is given a function that says whether anybody still waits for it."""


@dataclass(eq=False)
class _Job:
    key: Hashable
    work: Work
    answer: asyncio.Future[Answer]
    gone: threading.Event = field(default_factory=threading.Event)
    asking: int = 0

    def run(self) -> Answer:
        return self.work(lambda: not self.gone.is_set())


class Desk:
    """A few threads, and who waits for them. For one event loop.

    Args:
        threads: how many answers are computed at once.
        room: so many bytes of answers are kept.
    """

    def __init__(self, threads: int, room: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "regard-desk")
        self._free = threads
        self._room = room
        self._held = 0
        self._jobs: dict[Hashable, _Job] = {}
        self._waiting: list[_Job] = []
        self._kept: OrderedDict[Hashable, Answer] = OrderedDict()

    def close(self) -> None:
        """Ends; what is computed just now is left to its end."""
        self._waiting.clear()
        for job in self._jobs.values():
            job.gone.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def ask(self, key: Hashable, work: Work) -> Answer:
        """The answer, computed unless it is kept or somebody asked for it already.

        Cancel it when the one who asked has left.

        Args:
            key: equal for equal questions.
            work: computes it, on another thread.

        Raises:
            Busy: too many questions wait.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        job = self._jobs.get(key)
        if job is None:
            if len(self._waiting) >= _MOST_WAITING:
                raise Busy
            job = _Job(key, work, asyncio.get_running_loop().create_future())
            self._jobs[key] = job
            self._waiting.append(job)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._waiting.append(job)
        job.asking += 1
        self._start()
        try:
            return await asyncio.shield(job.answer)
        finally:
            job.asking -= 1
            if not job.asking and not job.answer.done():
                self._drop(job)

    def _start(self) -> None:
        while self._free and self._waiting:
            job = self._waiting.pop()
            self._free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, job.run)
            running.add_done_callback(partial(self._finish, job))

    def _finish(self, job: _Job, running: asyncio.Future[Answer]) -> None:
        self._free += 1
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        # Asked for also where nobody waits: asyncio complains of errors that nobody looked at.
        error = None if running.cancelled() else running.exception()
        if running.cancelled() or job.answer.done():
            job.answer.cancel()
        elif error is not None:
            job.answer.set_exception(error)
        else:
            job.answer.set_result(running.result())
            self._keep(job.key, running.result())
        self._start()

    def _drop(self, job: _Job) -> None:
        """Nobody waits for it any more."""
        job.gone.set()
        job.answer.cancel()
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        if job in self._waiting:
            self._waiting.remove(job)

    def _keep(self, key: Hashable, answer: Answer) -> None:
        if not answer.final or len(answer.content) > self._room:
            return
        self._kept[key] = answer
        self._held += len(answer.content)
        while self._held > self._room:
            _, oldest = self._kept.popitem(last=False)
            self._held -= len(oldest.content)
