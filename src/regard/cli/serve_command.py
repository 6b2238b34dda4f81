"""``regard serve``: show a recording of any length as a page, or a text that can be edited."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from regard.cli.options import (
    Input,
    NoPicture,
    Server,
    TextOptions,
    open_recording,
    option,
    quick_trials,
    reach,
    read_input,
    text_of,
    with_options,
)
from regard.cli.output_files import report_refused

if TYPE_CHECKING:
    from regard.recording.recording import Recording

Read = Callable[[str, Callable[[int, int | None], None]], "Recording"]
Port = Annotated[
    int | None, option("--port N", "Port of the server. Default: any free port.", min=1, max=65535)
]
NoBrowser = Annotated[bool, option("--no-browser", "Print the address without opening a browser.")]


@with_options
def serve(
    options: TextOptions,
    text: Input = None,
    server: Server = None,
    port: Port = None,
    no_browser: NoBrowser = False,
    no_picture: NoPicture = False,
) -> None:
    """Show a recording of any length, or a text that can be edited, as a page until Ctrl-C."""
    from regard.cli.progress import progress
    from regard.errors import optional_module

    for package in ("msgspec", "starlette", "uvicorn"):
        optional_module(package, f"serve needs {package}", "'regard[cli]'")
    from regard.view.server import http_server

    words = read_input(text) if server is None else text_of(text)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, with its clean-up
    here = partial(http_server.serve, port=port, open_browser=not no_browser, tell=_write_address)
    if isinstance(words, Path):
        options.check_alone(words)
        seen = open_recording(words, strict=options.strict, no_picture=no_picture)
        here(seen, path=words)
        return
    with TemporaryDirectory(prefix="regard-") as folder:
        with progress() as report:
            report(f"loading and running {server or options.name}")
            if server is None:
                words, read = _reader_here(options, words)
            else:
                options.check_served()
                read = _reader_there(server, Path(folder))
            seen = read(words, partial(report, f"running {server or options.name}"))
            report_refused(seen, strict=options.strict)
        here(seen, text=words, read=read)


def _reader_here(options: TextOptions, words: str) -> tuple[str, Read]:
    """Return a text, cut if the options say so, and a function that lets a model read a text."""
    from regard.errors import RegardError

    pretrained = options.load()
    words = options.cut(pretrained, words)
    trials = quick_trials(pretrained)

    def read(words: str, report_progress: Callable[[int, int | None], None]) -> "Recording":
        try:
            pretrained.encode(words)
        except ValueError as error:
            raise RegardError(str(error)) from error
        return pretrained.observe(
            words, keep="qkv", progress=report_progress, strict=options.strict, trials=trials
        )

    return words, read


def _reader_there(url: str, folder: Path) -> Read:
    """Return a function that lets the model of a server read a text; the page reads its file."""
    server, numbers = reach(url), count()

    def read(words: str, _: Callable[[int, int | None], None]) -> "Recording":
        # The page reads the last recording until this one has arrived.
        for old in sorted(folder.glob("*.safetensors"))[:-1]:
            old.unlink()
        return server.record(words, folder / f"{next(numbers):09}.safetensors", max_tokens=1)

    return read


def _write_address(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
