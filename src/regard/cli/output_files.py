"""Output of the commands: files, JSON for programs, and one line about refused layers."""

import json
import math
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.text.escaping import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from regard.recording.layers import Refusal
    from regard.recording.recording import Recording
    from regard.view.tiles.manifest import PageLayer

_MIB = 2**20
_MOST_NAMES = 3
_ROUNDING = 1e-6  # of a weight, by 32 bits; less is not worth a line


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written before any work is done for it."""
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif path.exists() and not path.is_file():
        reason = "it is no ordinary file"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    else:
        try:
            # A file is written beside its place and then moved there: this asks for the same.
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = error.strerror
    if reason is not None:
        raise ValueError(
            f"output is {str(path)!r}, which cannot be written: {reason}.\n"
            "    Choose a file in a folder that exists and is writable."
        )


def write_page(
    seen: "Recording",
    page: Path,
    report: Callable[..., None],
    *,
    limit: int,
    **options: Any,
) -> str:
    """Write a recording as a page, and return the lines about it for the terminal.

    Args:
        seen: the recording.
        page: the file.
        report: reports progress.
        limit: the size of the page at most, in MiB.
        options: more of those of ``regard.page``.
    """
    from regard.view.export import page_file

    page_file.write_page(
        seen,
        page,
        limit=limit * _MIB * 63 // 64,  # a 64th is for the page's own code
        progress=partial(report, f"writing {page}"),
        **options,
    )
    return _page_lines(page, page_file.read_layers(page), options.get("layers"))


def _page_lines(
    page: Path, held: "Sequence[PageLayer]", chosen: "Sequence[int] | None" = None
) -> str:
    """Return where a page is, how large, and which of its layers are exact.

    Args:
        page: the file.
        held: what it has of each layer.
        chosen: the layers that had to be exact, if an option named them.
    """
    size = page.stat().st_size
    lines = [page_line(page)]
    exact = [layer for layer in held if layer.kind in ("query-key", "weights")]
    means = [layer for layer in held if layer not in exact]
    if means:
        lines.append(f"    exact: {_layers_text(exact)}" if exact else "    no layer is exact")
    else:
        lines.append("    every layer is exact")
    rounded = [layer for layer in exact if layer.deviation > _ROUNDING]
    if rounded:
        off = max(layer.deviation for layer in rounded)
        more = "" if means else f"; in 32 bits with --limit {math.ceil(2 * size / _MIB)}"
        lines.append(f"    in 16 bits, weights within {off:.1g}: {_layers_text(rounded)}{more}")
    for block in sorted({layer.block for layer in means}):
        some = [layer for layer in means if layer.block == block]
        words = f"means of {block} x {block} tokens" if block > 1 else "weights in one byte each"
        lines.append(f"    {words}: {_layers_text(some)}")
    if means and not exact:  # one alone would not fit either
        lines.append("    to have layers exact: a larger --limit; or regard serve")
    elif means:
        more = f"--limit {math.ceil(size / len(exact) * len(held) / _MIB)}"
        if chosen is not None:  # no limit makes a layer exact that --layers leaves out
            more = "leave out --layers" if len(exact) >= len(chosen) else f"{more} without --layers"
        lines.append(
            f"    to have others exact: --layers {means[0].place}, for all {more}; or regard serve"
        )
    return "\n".join(lines)


def page_line(page: Path) -> str:
    """Return where a page is, and how large."""
    size = page.stat().st_size / 1000
    return f"{visible(str(page))}   {size:,.0f} kB, one file, opens in any browser"


def _layers_text(layers: "Sequence[PageLayer]") -> str:
    """Return the places of some layers, as ``--layers`` takes them."""
    runs: list[list[int]] = []
    for place in sorted({layer.place for layer in layers}):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {text}"


def report_refused(seen: "Recording", *, strict: bool = False) -> None:
    """Write one line about the refused layers to standard error; nothing if there are none.

    Args:
        seen: a recording, of a model or from a file.
        strict: if True, raise an error instead.

    Raises:
        RegardError: layers were refused, and strict is True.
    """
    if not seen.refused:
        return
    from regard.errors import RegardError

    text = _refused_text(seen.refused)
    if strict:
        raise RegardError(f"{text}\n    Leave out --strict to see the other layers.")
    sys.stderr.write(f"regard: {visible(text)}\n")


def _refused_text(refused: "Sequence[Refusal]") -> str:
    """Return the number of refused layers, the first names and the first reason."""
    from regard.errors import count_text

    names = list(dict.fromkeys(refusal.module for refusal in refused))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(map(repr, names[:_MOST_NAMES])) + more
    are = "was refused and is" if len(names) == 1 else "were refused and are"
    first = refused[0]
    reason, _, _ = first.reason.partition("\n")  # the next line is the remedy
    if first.line is not None and first.line not in reason:
        reason = f"{first.line}: {reason}"
    label = "reason" if len({refusal.reason for refusal in refused}) == 1 else "first reason"
    return f"{count_text(len(names), 'layer')} {are} missing: {listed}; {label}: {reason}"


def show_page(page: Path) -> None:
    """Open a page in a browser, or say that there is none."""
    if not webbrowser.open(page.resolve().as_uri()):
        sys.stderr.write(f"regard: no browser was found; open {visible(str(page))} yourself\n")


def print_lines(lines_of: "Callable[[int], Iterable[RenderableType]]") -> None:
    """Write the lines for some width to standard output; what looks like markup is text."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines_of(console.width):
        console.print(line)


def refusals(seen: "Recording") -> list[dict[str, Any]]:
    """Return the refused layers as JSON has them."""
    return [refusal._asdict() for refusal in seen.refused]


def write_json(value: object) -> None:
    """Write one line of JSON to standard output.

    A number that JSON cannot write, NaN or infinity, becomes null.

    Example:
        >>> from regard.cli.output_files import write_json
        >>> write_json({"score": float("nan"), "layers": ("a", "b")})
        {"score": null, "layers": ["a", "b"]}
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    sys.stdout.write(json.dumps(finite) + "\n")
