"""``regard see``: what a model attends to, in the terminal and as a page."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.console import Console

from regard.analysis.head_kinds import stand_out
from regard.cli.options import AsJson, Open, RecordOptions, Text, with_options
from regard.cli.output_files import check_output, page_line, show_page, write_json
from regard.cli.progress import progress
from regard.models.trials import repetition
from regard.recording.layers import recorded_indices
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
    ),
]
NoPage = Annotated[bool, typer.Option("--no-page", help="Write no page.")]


@with_options
def see(
    options: RecordOptions,
    text: Text = None,
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
    if no_page and (output is not None or open_page):
        raise ValueError("--no-page excludes --output and --open.\n    Leave out one of them.")
    page = output
    if page is None and not no_page and (open_page or not as_json):
        page = Path("attention.html")
    if page is not None:
        check_output(page)
    words = options.read(text)
    with progress() as report:
        report(f"loading and running {options.name}")
        pretrained, words = options.load_for(words)
        seen = options.observe(pretrained, words)
        report("reading random tokens twice")
        ran = pretrained.writer if options.generate else pretrained.model
        trials = repetition(ran, limit=pretrained.limit, texts=1)
        asking = partial(report, "asking every head")
        summary = summarise(seen, selection=selection, top=top, trials=trials, progress=asking)
        if page is not None:
            write_page(
                seen,
                page,
                title=visible(shorten(words, 60, placeholder=" …")),
                opened=recorded_indices(seen.layers, layer, head),
                heads=summary.heads,
                progress=partial(report, f"writing {page}"),
            )
    if as_json:
        write_json(_as_json(seen, summary, page))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(TerminalView(summary))
        if page is not None:
            console.print(f"\n{page_line(page)}")
    if open_page and page is not None:
        show_page(page)


def _as_json(seen: Recording, summary: Summary, page: Path | None) -> dict[str, Any]:
    """Return the summary as lists and dictionaries: positions from 0, shares from 0 to 1."""
    return {
        "model": summary.model,
        "tokens": [token._asdict() for token in summary.tokens],
        "layers": summary.layers,
        "refused": [refusal._asdict() for refusal in seen.refused],
        "selection": asdict(summary.selection),
        "sinks": summary.sinks,
        "rows": [asdict(row) for row in summary.rows],
        "heads": [{"name": head.name, **asdict(head)} for head in summary.heads],
        "stand_out": [
            {"name": head.name, "kind": head.kind, "reason": reason}
            for head, reason in stand_out(summary.heads)
        ],
        "page": None if page is None else str(page),
    }
