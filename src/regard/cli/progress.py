"""Progress of a command that takes long."""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from regard.text.escaping import visible

# A log has a line now and then; a command that is done before that has none.
_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress() -> Generator[Callable[..., None]]:
    """Report on standard error what is being done: ``report(what, done, total)``.

    A terminal shows a line that is gone at the end. A file or a pipe gets a line every 10 seconds
    if there is something new.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        with _lines() as report:
            yield report
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def report(what: str, done: int = 0, total: int | None = None) -> None:
            bar.update(task, description=visible(what), completed=done, total=total)

        yield report


@contextlib.contextmanager
def _lines() -> Generator[Callable[..., None]]:
    """Write the latest state now and then, from a thread: one step may take minutes."""
    state = written = ""
    ended = threading.Event()

    def write() -> None:
        nonlocal written
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            if state != written and sys.stderr is not None:
                sys.stderr.write(f"regard: {state}\n")
                sys.stderr.flush()
                written = state

    def report(what: str, done: int = 0, total: int | None = None) -> None:
        nonlocal state
        state = visible(what) + (f": {100 * done // total} %" if total else "")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield report
    finally:
        ended.set()
        writer.join()
