"""``regard serve``: show a recording of any length as a page, or a text that can be edited."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import Input, NoPicture, TextOptions, read_input, with_options

if TYPE_CHECKING:
    from regard.recording.recording import Recording

__all__ = ["serve"]

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
    text: Input = None,
    port: Port = None,
    no_browser: NoBrowser = False,
    no_picture: NoPicture = False,
) -> None:
    """Show a recording of any length, or a text that can be edited, as a page until Ctrl-C."""
    from regard.cli.output_files import report_refused
    from regard.cli.progress import progress
    from regard.errors import RegardError

    try:
        from regard.view.server import http_server as server
    except ModuleNotFoundError as missing:
        name = str(missing.name).partition(".")[0]
        raise RegardError(
            f"serve needs {name}, which is not installed.\n    Run: pip install 'regard[cli]'"
        ) from missing
    words = read_input(text)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, with its clean-up
    if isinstance(words, Path):
        options.check_alone(words)
        server.serve(
            words,
            port=port,
            open_browser=not no_browser,
            no_picture=no_picture,
            tell=_write_address,
        )
        return
    with progress() as report:
        report(f"loading and running {options.name}")
        pretrained, words = options.load_for(words)

        def read(words: str, report_progress: Callable[[int, int | None], None]) -> "Recording":
            try:
                pretrained.encode(words)
            except ValueError as error:
                raise RegardError(str(error)) from error
            return pretrained.observe(
                words, keep="qkv", progress=report_progress, strict=options.strict
            )

        seen = read(words, partial(report, f"running {options.name}"))
        report_refused(seen)
    server.serve_text(
        seen, words, read, port=port, open_browser=not no_browser, tell=_write_address
    )


def _write_address(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
