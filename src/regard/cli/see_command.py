"""``regard see``: what a model attends to, in the terminal and as a page."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console

from regard.analysis.head_kinds import stand_out
from regard.cli.options import AsJson, HeadOfLayer, Layer, Model, Output, Text, TextFile, Top
from regard.cli.output_files import check_output
from regard.cli.progress import progress
from regard.cli.text_argument import given_text
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.text.escaping import visible
from regard.view.export.page_file import write_page
from regard.view.terminal.summary import Selection, Summary, summarise
from regard.view.terminal.terminal_view import TerminalView

__all__ = ["see"]


def see(
    text: Text = None,
    file: TextFile = None,
    model: Model = DEFAULT_MODEL,
    layer: Layer = None,
    head: HeadOfLayer = None,
    top: Top = 3,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model attends to when it reads a text."""
    selection = Selection(layer, head)
    page = output or (None if as_json else Path("attention.html"))
    if page is not None:
        check_output(page)
    words = check_text(given_text(text, file))
    with progress() as tell:
        tell(f"loading and running {model}")
        seen = Pretrained.load(model).observe(words)
        summary = summarise(
            seen, selection=selection, top=top, progress=partial(tell, "asking every head")
        )
        if page is not None:
            title = visible(shorten(words, 60, placeholder=" …"))
            told = partial(tell, f"writing {page}")
            opened = (layer, head)
            write_page(seen, page, title=title, opened=opened, heads=summary.heads, progress=told)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(summary, page)) + "\n")
    else:
        _show(summary, page)


def _show(summary: Summary, page: Path | None) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(TerminalView(summary))
    if page is not None:
        size = f"{page.stat().st_size / 1000:,.0f} kB"
        console.print()
        console.print(f"{visible(str(page))}   {size}, one file, opens in any browser")


def _as_json(summary: Summary, page: Path | None) -> dict[str, Any]:
    """The summary in plain lists and dictionaries; places count from 0, shares go from 0 to 1."""
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
