"""``regard compare``: how much the heads of two recordings differ."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from regard.cli.options import AsJson, Run
from regard.cli.output_files import write_json
from regard.cli.progress import progress
from regard.cli.recording_argument import answered, opened
from regard.matrix.comparisons import js
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.text.tables import Table

__all__ = ["compare"]

Other = Annotated[Path, typer.Argument(metavar="OTHER", help="Another recording.")]
Top = Annotated[int, typer.Option("--top", min=1, metavar="N", help="Number of heads to print.")]


class _Difference(NamedTuple):
    """A head, and the mean Jensen-Shannon divergence of its rows, from 0 to 1."""

    layer: int
    head: int
    difference: float


def compare(run: Run, other: Other, top: Top = 10, as_json: AsJson = False) -> None:
    """Show which heads attend differently in two recordings.

    Both need the same number of tokens. The difference of a head is the mean Jensen-Shannon
    divergence of its rows: 0 % if both attend alike, 100 % if they share no token.
    """
    one, two = opened(run), opened(other)
    _check_alike(run, one, other, two)
    found: list[_Difference] = []
    with progress() as tell, answered(run, one), answered(other, two):
        for place, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
            tell("comparing every layer", place, len(one.layers))
            rows = js(mine.whole(), theirs.whole()) / math.log(2)  # (..., num_heads, q_len)
            means = rows.double().mean(-1)
            columns = means.shape[-1] if means.ndim else 1
            heads = cast(list[float], means.reshape(-1, columns).mean(0).tolist())
            found += [
                _Difference(mine.place(place), mine.head(head), share)
                for head, share in enumerate(heads)
            ]
    if as_json:
        write_json(_as_json(one, two, found))
    else:
        sys.stdout.write(_as_text(run, other, found, top))


def _check_alike(run: Path, one: Recording, other: Path, two: Recording) -> None:
    mine, theirs = list(one.shapes.values()), list(two.shapes.values())
    if mine != theirs:
        raise ValueError(
            f"{run} has {len(mine)} layers, the first of shape {tuple(mine[0])}, and {other} has "
            f"{len(theirs)}, the first of shape {tuple(theirs[0])}; both must be alike.\n"
            "    Compare texts of as many tokens, in models of the same shape."
        )


def _mean(found: list[_Difference]) -> float:
    return sum(one.difference for one in found) / len(found)


def _as_text(run: Path, other: Path, found: list[_Difference], top: int) -> str:
    most = sorted(found, key=lambda one: -one.difference)[:top]
    table = Table(
        {
            "head": [f"L{one.layer}H{one.head}" for one in most],
            "difference": [f"{100 * one.difference:.1f} %" for one in most],
        }
    )
    names = f"{visible(str(run))} and {visible(str(other))}"
    return (
        f"{names} differ by {100 * _mean(found):.1f} % in the mean of {len(found)} heads\n\n"
        f"{table.text()}\n"
    )


def _as_json(one: Recording, two: Recording, found: list[_Difference]) -> dict[str, Any]:
    return {
        "models": [one.model, two.model],
        "mean": _mean(found),
        "heads": [each._asdict() for each in found],
    }
