"""``regard serve``: show recordings of any length as pages, or a text that can be edited."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Device, Dtype, MaxTokens, Model, TextFile, cut_to_tokens
from regard.cli.progress import progress
from regard.cli.text_argument import read_text
from regard.errors import RegardError
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.recording.recording import Recording

__all__ = ["serve"]

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RUN...]", help="Recordings from regard record.", show_default=False),
]
Words = Annotated[
    str | None,
    typer.Option(
        "--text",
        "-t",
        metavar="TEXT",
        help="Run a model on this text instead; the page can edit it. - reads standard input.",
        show_default=False,
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
        show_default=False,
    ),
]
NoBrowser = Annotated[
    bool, typer.Option("--no-browser", help="Print the address without opening a browser.")
]


def serve(
    runs: Runs = None,
    text: Words = None,
    file: TextFile = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
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
    if bool(runs) == (text is not None or file is not None):
        raise ValueError(
            "serve needs either recordings or a text, and not both.\n"
            "    Run for example: regard serve run.safetensors\n"
            '                 or: regard serve --text "Life is short"'
        )
    if runs:
        server.serve(runs, port=port, open_browser=not no_browser, tell=_write_address)
        return
    words = check_text(read_text(text, file))
    with progress() as report:
        report(f"loading and running {model}")
        pretrained = Pretrained.load(model, device=device, dtype=dtype)

        def read(words: str, report_progress: Callable[[int, int | None], None]) -> Recording:
            return pretrained.observe(words, keep="qkv", progress=report_progress)

        words = cut_to_tokens(pretrained, words, max_tokens)
        seen = read(words, lambda done, layers: report(f"running {model}", done, layers))
    server.serve_text(
        seen, words, read, port=port, open_browser=not no_browser, tell=_write_address
    )


def _write_address(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
