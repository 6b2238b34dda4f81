"""``regard serve``: show recordings of any length as pages."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.errors import RegardError

__all__ = ["serve"]

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Recordings from regard record.")
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        metavar="N",
        help="Port of the server. Default: any free port.",
        show_default=False,
    ),
]
NoBrowser = Annotated[
    bool, typer.Option("--no-browser", help="Print the address without opening a browser.")
]


def serve(runs: Runs, port: Port = None, no_browser: NoBrowser = False) -> None:
    """Show recordings of any length as pages, until Ctrl-C."""
    try:
        from regard.view.server import http_server as server
    except ModuleNotFoundError as missing:
        name = str(missing.name).partition(".")[0]
        raise RegardError(
            f"serve needs {name}, which is not installed.\n    Run: pip install 'regard[cli]'"
        ) from missing
    server.serve(runs, port=port, open_browser=not no_browser, tell=_tell)


def _tell(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
