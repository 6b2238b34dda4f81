"""What a command is doing, while it takes long."""

import contextlib
import sys
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from regard.text.escaping import visible

__all__ = ["progress"]


@contextlib.contextmanager
def progress() -> Generator[Callable[..., None]]:
    """A line on standard error that says what is being done: ``tell(what, done, total)``.

    Shown only where standard error is a terminal, and gone at the end.

    Example:
        >>> from regard.cli.progress import progress
        >>> with progress() as tell:
        ...     tell("asking every head", 3, 6)
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
    )
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int = 0, total: int | None = None) -> None:
            bar.update(task, description=visible(what), completed=done, total=total)

        yield tell
