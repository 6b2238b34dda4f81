"""``regard compare``: how much the heads of two recordings or two texts differ."""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from regard.cli.options import AsJson, Device, Dtype, Model, Open
from regard.cli.output_files import check_output, page_line, show_page, write_json
from regard.cli.progress import progress
from regard.cli.recording_argument import open_recording
from regard.errors import count_text
from regard.matrix.comparisons import js
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.text.tables import Table
from regard.view.export.page_file import write_page

__all__ = ["compare"]

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN OTHER]", help="Two recordings from regard record.", show_default=False
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        "-t",
        metavar="TEXT",
        help="Run a model on this text instead; give it twice.",
        show_default=False,
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
        show_default=False,
    ),
]


class _Difference(NamedTuple):
    """A head, and the mean Jensen-Shannon divergence of its rows, from 0 to 1."""

    layer: int
    head: int
    difference: float


class _Pair(NamedTuple):
    """Two recordings, and what they are called."""

    one: Recording
    two: Recording
    names: tuple[str, str]

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of keys of each."""
        one, two = (next(iter(seen.shapes.values()))[-1] for seen in (self.one, self.two))
        return one, two


def compare(
    runs: Runs = None,
    texts: Words = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "cpu",
    dtype: Dtype = None,
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
            pair = _Pair(
                open_recording(runs[0]), open_recording(runs[1]), (str(runs[0]), str(runs[1]))
            )
        else:
            report(f"loading and running {model}")
            pair = _observe_both(Pretrained.load(model, device=device, dtype=dtype), texts or [])
        is_alike = list(pair.one.shapes.values()) == list(pair.two.shapes.values())
        if not is_alike and page is None:
            raise ValueError(_shape_mismatch(pair))
        report("comparing every layer")
        found = _differences(pair.one, pair.two) if is_alike else []
        if page is not None:
            _write(pair, found, page, partial(report, f"writing {page}"))
    differences = [difference for _, difference in found]
    if as_json:
        write_json(_as_json(pair, differences))
    else:
        sys.stdout.write(_as_text(pair, differences, top))
        if page is not None:
            sys.stdout.write(f"\n{page_line(page)}\n")
    if open_page and page is not None:
        show_page(page)


def _observe_both(pretrained: Pretrained, texts: list[str]) -> _Pair:
    one, two = (pretrained.observe(check_text(text)) for text in texts)
    return _Pair(one, two, _short_names(*texts))


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


def _differences(one: Recording, two: Recording) -> list[tuple[tuple[int, int], _Difference]]:
    """Return the difference of each head, with its place in the recording."""
    found: list[tuple[tuple[int, int], _Difference]] = []
    for place, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
        rows = js(mine.whole(), theirs.whole()) / math.log(2)  # (..., num_heads, q_len)
        means = rows.double().mean(-1)
        columns = means.shape[-1] if means.ndim else 1
        heads = cast(list[float], means.reshape(-1, columns).mean(0).tolist())
        found += [
            ((place, head), _Difference(mine.place(place), mine.head(head), share))
            for head, share in enumerate(heads)
        ]
    return found


def _write(
    pair: _Pair,
    found: list[tuple[tuple[int, int], _Difference]],
    page: Path,
    progress: Callable[..., None],
) -> None:
    """Write the page of both, opened at the head that differs most."""
    most = max(found, key=lambda each: each[1].difference, default=None)
    title, other_title = map(visible, pair.names)
    write_page(
        pair.one,
        page,
        title=title,
        opened=(None, None) if most is None else most[0],
        other=pair.two,
        other_title=other_title,
        progress=progress,
    )


def _shape_mismatch(pair: _Pair) -> str:
    """Return why two recordings have no difference."""
    shapes = [list(seen.shapes.values()) for seen in (pair.one, pair.two)]
    shapes_text = (
        f"{name} has {count_text(len(each), 'layer')}, the first of shape {tuple(each[0])}"
        for name, each in zip(pair.names, shapes, strict=True)
    )
    return (
        f"{', and '.join(shapes_text)}; both must have the same shapes.\n"
        "    Compare texts with the same number of tokens; with -o page.html regard shows any "
        "two side by side."
    )


def _mean(found: list[_Difference]) -> float:
    return sum(one.difference for one in found) / len(found)


def _as_text(pair: _Pair, found: list[_Difference], top: int) -> str:
    first, second = map(visible, pair.names)
    if not found:
        return (
            f"{first} and {second} have {pair.lengths[0]:,} and {pair.lengths[1]:,} tokens in "
            f"{len(pair.one.layers)} and {len(pair.two.layers)} layers: their cells have no "
            "difference\n"
        )
    most = sorted(found, key=lambda one: -one.difference)[:top]
    table = Table(
        {
            "head": [f"L{one.layer}H{one.head}" for one in most],
            "difference": [f"{100 * one.difference:.1f} %" for one in most],
        }
    )
    return (
        f"{first} and {second} differ by {100 * _mean(found):.1f} % in the mean of {len(found)} "
        f"heads\n\n{table.text()}\n"
    )


def _as_json(pair: _Pair, found: list[_Difference]) -> dict[str, Any]:
    return {
        "models": [pair.one.model, pair.two.model],
        "mean": _mean(found) if found else None,
        "heads": [each._asdict() for each in found],
    }
