"""How far the work is, on stderr: one line that is written anew in a terminal, else many."""

import sys
from time import monotonic

from benchmarks.registry import Job

__all__ = ["Progress"]


class Progress:
    """Say before each job which one it is; `clear` before anything else is shown."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._start = monotonic()
        self._terminal = sys.stderr.isatty()

    def at(self, place: int, job: Job) -> None:
        """Job number `place`, from 0, begins."""
        minutes, seconds = divmod(int(monotonic() - self._start), 60)
        length = "" if job.tokens is None else f", {job.tokens:,} tokens"
        text = f"[{place + 1}/{self._jobs}, {minutes}:{seconds:02}] {job.case.name}{length} ..."
        print(text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
