"""``regard compare``: how much the heads of two recordings or two texts differ."""

import math
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, cast

import typer

from regard.cli.options import AsJson, ModelOptions, Open, open_recording, with_options
from regard.cli.output_files import check_output, page_line, report_refused, show_page, write_json
from regard.cli.progress import progress
from regard.errors import count_text
from regard.matrix.comparisons import js
from regard.models.pretrained import check_text
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.text.tables import Table
from regard.view.export.page_file import write_page

__all__ = ["compare"]

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RUN OTHER]", help="Two recordings from regard record."),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text", "-t", metavar="TEXT", help="Run a model on this text instead; give it twice."
    ),
]
Top = Annotated[int, typer.Option("--top", min=1, metavar="N", help="Number of heads to print.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write a page that shows both side by side, and their difference.",
    ),
]


@with_options
def compare(
    options: ModelOptions,
    runs: Runs = None,
    texts: Texts = None,
    top: Top = 10,
    output: Output = None,
    open_page: Open = False,
    as_json: AsJson = False,
) -> None:
    """Show which heads attend differently in two recordings or two texts.

    The difference of a head is the mean Jensen-Shannon divergence of its rows: 0 % if both attend
    alike, 100 % if they share no token. It needs the same number of tokens. A page of -o shows
    other texts, too, side by side.
    """
    page = output or (Path("attention.html") if open_page else None)
    if page is not None:
        check_output(page)
    if len(runs or texts or ()) != 2 or (runs and texts):
        raise ValueError(
            "compare needs two recordings or two texts.\n"
            "    Run for example: regard compare run.safetensors other.safetensors\n"
            '                 or: regard compare --text "Life is short" --text "Life is long"'
        )
    with progress() as report:
        if runs:
            one, two = map(open_recording, runs)
            names = [visible(str(run)) for run in runs]
        else:
            report(f"loading and running {options.name}")
            pretrained = options.load()
            one, two = (pretrained.observe(check_text(text)) for text in texts or ())
            report_refused(one)  # the same model refuses the same layers of both
            names = [visible(name) for name in _short_names(*(texts or ()))]
        report("comparing every layer")
        found: dict[tuple[int, int], float] = {}
        if list(one.shapes.values()) == list(two.shapes.values()):
            found = _differences(one, two)
        elif page is None:
            raise ValueError(_shape_mismatch(one, two, names))
        if page is not None:
            writing = partial(report, f"writing {page}")
            most = max(found, key=lambda place: found[place], default=(None, None))
            title, other = names
            write_page(
                one, page, title=title, opened=most, other=two, other_title=other, progress=writing
            )
    heads = _heads(one, found)
    if as_json:
        mean = fmean(found.values()) if found else None
        write_json({"models": [one.model, two.model], "mean": mean, "heads": heads})
    else:
        line = "" if page is None else f"\n{page_line(page)}\n"
        sys.stdout.write(_as_text(one, two, names, heads, top) + line)
    if open_page and page is not None:
        show_page(page)


def _short_names(*texts: str) -> tuple[str, str]:
    """Shorten two texts to 40 characters that show where they begin to differ."""
    one, two = (" ".join(text.split()) for text in texts)
    pairs = enumerate(zip(one, two, strict=False))
    differ = next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
    start = max(0, differ - 20) if max(len(one), len(two)) > 40 else 0
    start = max(start, one.find(" ", start, differ) + 1) if start else 0  # not inside a word
    first, second = (
        f"{'…' if start else ''}{text[start : start + 40]}{'…' if len(text) > start + 40 else ''}"
        for text in (one, two)
    )
    return first, second


def _heads(one: Recording, found: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return each head by its place in the model, with its difference."""
    return [
        {"layer": layer.place(place), "head": layer.head(head), "difference": share}
        for (place, head), share in found.items()
        for layer in [one.layers[place]]
    ]


def _as_text(
    one: Recording, two: Recording, names: list[str], heads: list[dict[str, Any]], top: int
) -> str:
    if not heads:
        lengths = [next(iter(seen.shapes.values()))[-1] for seen in (one, two)]
        return (
            f"{names[0]} and {names[1]} have {lengths[0]:,} and {lengths[1]:,} tokens in "
            f"{len(one.layers)} and {len(two.layers)} layers: their cells have no difference\n"
        )
    most = sorted(heads, key=lambda head: -head["difference"])[:top]
    table = Table(
        {
            "head": [f"L{head['layer']}H{head['head']}" for head in most],
            "difference": [f"{100 * head['difference']:.1f} %" for head in most],
        }
    )
    mean = fmean(head["difference"] for head in heads)
    return (
        f"{names[0]} and {names[1]} differ by {100 * mean:.1f} % in the mean of {len(heads)} "
        f"heads\n\n{table.text()}\n"
    )


def _differences(one: Recording, two: Recording) -> dict[tuple[int, int], float]:
    """Return the difference of each head, by the places of its layer and of itself."""
    found: dict[tuple[int, int], float] = {}
    for place, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
        rows = js(mine.whole(), theirs.whole()) / math.log(2)  # (..., num_heads, q_len)
        means = rows.double().mean(-1)
        # A layer without an axis of heads has one head.
        num_heads = means.shape[-1] if means.ndim else 1
        heads = cast(list[float], means.reshape(-1, num_heads).mean(0).tolist())
        found |= {(place, head): share for head, share in enumerate(heads)}
    return found


def _shape_mismatch(one: Recording, two: Recording, names: list[str]) -> str:
    """Return why two recordings have no difference."""
    shapes = [list(seen.shapes.values()) for seen in (one, two)]
    texts = (
        f"{name} has {count_text(len(each), 'layer')}, the first of shape {tuple(each[0])}"
        for name, each in zip(names, shapes, strict=True)
    )
    return (
        f"{', and '.join(texts)}; both must have the same shapes.\n"
        "    Compare texts with the same number of tokens; with -o page.html regard shows any "
        "two side by side."
    )
