"""``regard compare``: how much the heads of two recordings or two texts differ."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from regard.cli.options import (
    AsJson,
    Limit,
    ModelOptions,
    Open,
    Output,
    open_recording,
    option,
    quick_trials,
    read_input,
    with_options,
)
from regard.cli.output_files import check_output, report_refused, show_page, write_json, write_page
from regard.text.escaping import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from regard.recording.recording import Recording

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT OTHER",
        help="Two recordings from regard record, or two texts, each in quotes or a file.",
    ),
]
Top = Annotated[int, option("--top N", "Number of heads to print.", min=1)]


@with_options
def compare(
    options: ModelOptions,
    inputs: Inputs = None,
    top: Top = 10,
    output: Output = None,
    limit: Limit = 64,
    open_page: Open = False,
    as_json: AsJson = False,
) -> None:
    """Show which heads attend differently in two recordings or two texts.

    The difference of a head is the mean Jensen-Shannon divergence of its rows: 0 % if both attend
    alike, 100 % if they share no token. It needs the same number of tokens. A page of -o shows
    other texts, too, side by side.
    """
    from regard.cli.progress import progress

    page = output or (Path("attention.html") if open_page else None)
    if page is not None:
        check_output(page)
    given, line = _two_inputs(inputs or ()), ""
    with progress() as report:
        one, two, names = _both(options, given, report)
        report("comparing every layer")
        found: dict[tuple[int, int], float] = {}
        if list(one.shapes.values()) == list(two.shapes.values()):
            found = _differences(one, two)
        elif page is None:
            raise ValueError(_shape_mismatch(one, two, names))
        if page is not None:
            most = max(found, key=lambda place: found[place], default=(None, None))
            title, other = names
            more: dict[str, Any] = {
                "other": two,
                "other_title": other,
                "opened": most,
                "limit": limit,
            }
            line = f"\n{write_page(one, page, report, title=title, **more)}\n"
    heads = [
        {"layer": layer.model_index(place), "head": layer.head(head), "difference": share}
        for (place, head), share in found.items()
        for layer in [one.layers[place]]
    ]
    if as_json:
        mean = fmean(found.values()) if found else None
        write_json({"models": [one.model, two.model], "mean": mean, "heads": heads})
    else:
        sys.stdout.write(_as_text(one, two, names, heads, top) + line)
    if open_page and page is not None:
        show_page(page)


def _two_inputs(inputs: Sequence[str]) -> list[str | Path]:
    """Return the texts, or the paths of recordings, that two arguments mean."""
    given = [read_input(each) for each in inputs]
    if len(given) != 2 or len({isinstance(each, Path) for each in given}) != 1:
        raise ValueError(
            "compare needs two recordings or two texts.\n"
            "    Run for example: regard compare run.safetensors other.safetensors\n"
            '                 or: regard compare "Life is short" "Life is long"'
        )
    return given


def _both(
    options: ModelOptions, given: list[str | Path], report: "Callable[..., None]"
) -> tuple["Recording", "Recording", list[str]]:
    """Return two recordings, opened or made of two texts, and their names."""
    first, second = given
    if isinstance(first, Path) and isinstance(second, Path):
        options.check_alone(first)
        return open_recording(first), open_recording(second), [str(first), str(second)]
    report(f"loading and running {options.name}")
    pretrained = options.load()
    texts = [options.cut(pretrained, str(text)) for text in given]
    trials = quick_trials(pretrained)
    one, two = (pretrained.observe(text, trials=trials) for text in texts)
    report_refused(one)  # the same model refuses the same layers of both
    return one, two, [visible(name) for name in _short_names(*texts)]


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


def _as_text(
    one: "Recording", two: "Recording", names: list[str], heads: list[dict[str, Any]], top: int
) -> str:
    from regard.text.tables import Table

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


def _differences(one: "Recording", two: "Recording") -> dict[tuple[int, int], float]:
    """Return the difference of each head, by the places of its layer and of itself."""
    from regard.matrix.comparisons import js

    found: dict[tuple[int, int], float] = {}
    for place, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
        rows = js(mine.whole(), theirs.whole()) / math.log(2)  # (..., num_heads, q_len)
        means = rows.double().mean(-1)
        # A layer without an axis of heads has one head.
        num_heads = means.shape[-1] if means.ndim else 1
        heads = cast(list[float], means.reshape(-1, num_heads).mean(0).tolist())
        found |= {(place, head): share for head, share in enumerate(heads)}
    return found


def _shape_mismatch(one: "Recording", two: "Recording", names: list[str]) -> str:
    """Return why two recordings have no difference."""
    from regard.errors import count_text

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
