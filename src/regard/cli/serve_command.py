"""``regard serve``: show recordings of any length as pages, or a text that can be edited."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import TextOption, TextOptions, with_options
from regard.cli.output_files import report_refused
from regard.cli.progress import progress
from regard.errors import RegardError
from regard.recording.recording import Recording

__all__ = ["serve"]

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN...]",
        help="Recordings from regard record. --text or --file runs a model instead; the page can "
        "edit its text.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        metavar="N",
        help="Port of the server. Default: any free port.",
    ),
]
NoBrowser = Annotated[
    bool, typer.Option("--no-browser", help="Print the address without opening a browser.")
]


@with_options
def serve(
    options: TextOptions,
    runs: Runs = None,
    text: TextOption = None,
    port: Port = None,
    no_browser: NoBrowser = False,
) -> None:
    """Show recordings of any length, or a text that can be edited, as pages until Ctrl-C."""
    try:
        from regard.view.server import http_server as server
    except ModuleNotFoundError as missing:
        name = str(missing.name).partition(".")[0]
        raise RegardError(
            f"serve needs {name}, which is not installed.\n    Run: pip install 'regard[cli]'"
        ) from missing
    if bool(runs) == (text is not None or options.file is not None):
        raise ValueError(
            "serve needs either recordings or a text, and not both.\n"
            "    Run for example: regard serve run.safetensors\n"
            '                 or: regard serve --text "Life is short"'
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, with its clean-up
    if runs:
        server.serve(runs, port=port, open_browser=not no_browser, tell=_write_address)
        return
    words = options.read(text)
    with progress() as report:
        report(f"loading and running {options.name}")
        pretrained, words = options.load_for(words)

        def read(words: str, report_progress: Callable[[int, int | None], None]) -> Recording:
            return pretrained.observe(words, keep="qkv", progress=report_progress)

        seen = read(words, partial(report, f"running {options.name}"))
        report_refused(seen)
    server.serve_text(
        seen, words, read, port=port, open_browser=not no_browser, tell=_write_address
    )


def _write_address(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
