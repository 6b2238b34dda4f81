"""``regard see``: what a model attends to, in the terminal and as a page."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.console import Console

from regard.analysis.head_kinds import stand_out
from regard.cli.options import (
    AsJson,
    Chat,
    Device,
    Dtype,
    Generate,
    Heads,
    Layers,
    MaxTokens,
    Model,
    Open,
    Text,
    TextFile,
    Values,
    cut_to_tokens,
    parse_positions,
)
from regard.cli.output_files import check_output, page_line, show_page, write_json
from regard.cli.progress import progress
from regard.cli.text_argument import read_text
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.models.trials import repetition
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.view.export.page_file import write_page
from regard.view.terminal.summary import Selection, Summary, summarise
from regard.view.terminal.terminal_view import TerminalView

__all__ = ["see"]

Layer = Annotated[
    int | None,
    typer.Option("--layer", min=0, metavar="N", help="Show this layer only, counted from 0."),
]
HeadOfLayer = Annotated[
    int | None,
    typer.Option("--head", min=0, metavar="N", help="Show this head of the layer only."),
]
Top = Annotated[
    int, typer.Option("--top", min=1, metavar="N", help="Number of tokens to print for each token.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the page to this file. Default: attention.html; no page with --json.",
        show_default=False,
    ),
]
NoPage = Annotated[bool, typer.Option("--no-page", help="Write no page.")]


def see(
    text: Text = None,
    file: TextFile = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    chat: Chat = False,
    generate: Generate = 0,
    layers: Layers = None,
    heads: Heads = None,
    values: Values = False,
    layer: Layer = None,
    head: HeadOfLayer = None,
    top: Top = 3,
    output: Output = None,
    no_page: NoPage = False,
    open_page: Open = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model attends to when it reads a text."""
    selection = Selection(layer, head)
    page = _page(output, no_page, open_page, as_json)
    words = check_text(read_text(text, file))
    with progress() as report:
        report(f"loading and running {model}")
        pretrained = Pretrained.load(model, device=device, dtype=dtype)
        words = cut_to_tokens(pretrained, words, max_tokens)
        seen = pretrained.observe(
            words,
            keep="qkv" if values else "qk",
            layers=parse_positions("layers", layers),
            heads=parse_positions("heads", heads),
            chat=chat,
            generate=generate,
        )
        report("reading random tokens twice")
        ran = pretrained.writer if generate else pretrained.model
        trials = repetition(ran, limit=pretrained.limit, texts=1)
        step = partial(report, "asking every head")
        summary = summarise(seen, selection=selection, top=top, trials=trials, progress=step)
        if page is not None:
            title = visible(shorten(words, 60, placeholder=" …"))
            _write(seen, page, title, summary, partial(report, f"writing {page}"))
    if as_json:
        write_json(_as_json(summary, page))
    else:
        _show(summary, page)
    if open_page and page is not None:
        show_page(page)


def _page(output: Path | None, no_page: bool, open_page: bool, as_json: bool) -> Path | None:
    """Return the page to write, if there is one, after a check that it can be written."""
    if no_page and (output is not None or open_page):
        raise ValueError("--no-page excludes --output and --open.\n    Leave out one of them.")
    usual = None if no_page or (as_json and not open_page) else Path("attention.html")
    page = output or usual
    if page is not None:
        check_output(page)
    return page


def _write(
    seen: Recording, page: Path, title: str, summary: Summary, progress: Callable[..., None]
) -> None:
    opened = (summary.selection.layer, summary.selection.head)
    write_page(seen, page, title=title, opened=opened, heads=summary.heads, progress=progress)


def _show(summary: Summary, page: Path | None) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(TerminalView(summary))
    if page is not None:
        console.print()
        console.print(page_line(page))


def _as_json(summary: Summary, page: Path | None) -> dict[str, Any]:
    """Return the summary as lists and dictionaries: positions from 0, shares from 0 to 1."""
    return {
        "model": summary.model,
        "tokens": [token._asdict() for token in summary.tokens],
        "layers": list(summary.layers),
        "selection": asdict(summary.selection),
        "sinks": list(summary.sinks),
        "rows": [asdict(row) for row in summary.rows],
        "heads": [{"name": head.name, **asdict(head)} for head in summary.heads],
        "stand_out": [
            {"name": head.name, "kind": head.kind, "reason": reason}
            for head, reason in stand_out(summary.heads)
        ],
        "page": None if page is None else str(page),
    }
