"""``regard see``: what a model attends to, in the terminal and as a page."""

from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

from regard.cli.options import (
    AsJson,
    Input,
    Limit,
    Open,
    RecordOptions,
    option,
    read_input,
    with_options,
)
from regard.cli.output_files import (
    check_output,
    print_lines,
    refusals,
    show_page,
    write_json,
    write_page,
)

if TYPE_CHECKING:
    from regard.recording.recording import Recording
    from regard.view.terminal.summary import Summary

Layer = Annotated[int | None, option("--layer N", "Show this layer only, counted from 0.", min=0)]
HeadOfLayer = Annotated[int | None, option("--head N", "Show this head of the layer only.", min=0)]
Top = Annotated[int, option("--top N", "Number of tokens to print for each token.", min=1)]
Output = Annotated[
    Path | None,
    option(
        "--output -o FILE",
        "Write the page to this file. Default: attention.html; no page with --json.",
    ),
]
NoPage = Annotated[bool, option("--no-page", "Write no page.")]


@with_options
def see(
    options: RecordOptions,
    text: Input = None,
    layer: Layer = None,
    head: HeadOfLayer = None,
    top: Top = 3,
    output: Output = None,
    limit: Limit = 64,
    no_page: NoPage = False,
    open_page: Open = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model attends to in a text, a picture, or both."""
    from regard.cli.progress import progress
    from regard.recording.layers import recorded_indices
    from regard.view.terminal.summary import summarise
    from regard.view.terminal.terminal_view import summary_lines

    _check_head(layer, head)
    if no_page and (output is not None or open_page):
        raise ValueError("--no-page excludes --output and --open.\n    Leave out one of them.")
    page = output
    if page is None and not no_page and (open_page or not as_json):
        page = Path("attention.html")
    if page is not None:
        check_output(page)
    words, lines = text if options.image is not None else read_input(text), None
    with progress() as report:
        seen = options.observe(words, report)
        summary = summarise(seen, layer, head, top, partial(report, "asking every head"))
        if page is not None:
            title = None
            if options.max_tokens is None and not isinstance(words, Path):
                title = shorten(words or str(options.image), 60, placeholder=" …")
            lines = write_page(
                seen,
                page,
                report,
                title=title,
                opened=recorded_indices(seen.layers, layer, head),
                heads=summary.heads,
                limit=limit,
            )
    if as_json:
        write_json(_as_json(seen, summary, page))
    else:
        print_lines(partial(summary_lines, summary))
        if lines is not None:
            print_lines(lambda _: ["", lines])
    if open_page and page is not None:
        show_page(page)


def _check_head(layer: int | None, head: int | None) -> None:
    if head is not None and layer is None:
        raise ValueError(
            f"head is {head} and no layer is given; heads of different layers have "
            "nothing in common.\n    Give a layer too."
        )


def _as_json(seen: "Recording", summary: "Summary", page: Path | None) -> dict[str, Any]:
    """Return the summary as lists and dictionaries: positions from 0, shares from 0 to 1."""
    from dataclasses import asdict

    from regard.analysis.head_kinds import stand_out

    return {
        "model": summary.model,
        "tokens": [token._asdict() for token in summary.tokens],
        "layers": summary.layers,
        "refused": refusals(seen),
        "selection": {"layer": summary.layer, "head": summary.head},
        "sinks": summary.sinks,
        "rows": [asdict(row) for row in summary.rows],
        "heads": [{"name": head.name, **asdict(head)} for head in summary.heads],
        "stand_out": [
            {"name": head.name, "kind": head.kind, "reason": reason}
            for head, reason in stand_out(summary.heads)
        ],
        "page": None if page is None else str(page),
    }
