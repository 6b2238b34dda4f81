"""``regard segments``: how much the parts of a text attend to each other."""

import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from regard.cli.options import AsJson, Run, Strict, open_recording, option, parse_named
from regard.cli.output_files import refusals, write_json

if TYPE_CHECKING:
    from regard.analysis.span_shares import Shares
    from regard.recording.recording import Recording
    from regard.text.tokens import Token

Parts = Annotated[
    list[str] | None,
    option(
        "--part -p NAME=WHAT",
        "A part of the text: tokens START:STOP, or a regular expression, whose first group "
        "counts. Repeat it for more parts.",
    ),
]
Queries = Annotated[
    list[str] | None,
    option(
        "--query -q NAME=WHAT", "A part whose queries count, as for --part. Default: all parts."
    ),
]
By = Annotated[
    Literal["sentence", "word"] | None, option("--by", "Split the whole text into these.")
]
NoSinks = Annotated[
    bool, option("--no-sinks", "Exclude the first token and special tokens, and renormalise.")
]
Beyond = Annotated[
    str | None,
    option("--beyond NAME", "Subtract the shares of this query part from those of the others."),
]
Per = Annotated[
    Literal["total", "layer", "head"],
    option("--per", "One row for the mean, for each layer, or for each head."),
]

_RANGE = re.compile(r"(\d+):(\d+)")


def segments(
    run: Run,
    parts: Parts = None,
    queries: Queries = None,
    by: By = None,
    no_sinks: NoSinks = False,
    beyond: Beyond = None,
    per: Per = "total",
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Show how much the parts of a text attend to each other."""
    from regard.analysis.span_shares import segment_shares
    from regard.cli.progress import progress
    from regard.text import spans

    with progress() as report:
        seen = open_recording(run, strict=strict)
        if (by is None) == (not parts):
            raise ValueError(
                "segments needs either --by or --part, and not both.\n"
                "    Run for example: regard segments RUN --by sentence\n"
                "                 or: regard segments RUN --part 'question=Who .*' "
                "--part 'doc=0:40'"
            )
        if by is None:
            cut = _parse_parts("part", parts or [], seen.key_tokens)
        else:
            split = spans.by_sentence if by == "sentence" else spans.by_word
            cut = split(seen.key_tokens)
        asked = _parse_parts("query", queries, seen.query_tokens) if queries else None
        asking = partial(report, "asking every layer")
        try:
            shares = segment_shares(seen, cut, queries=asked, sinks=not no_sinks, progress=asking)
        except ValueError as error:
            if not str(error).startswith("queries is None"):
                raise
            raise ValueError(
                f"query is missing; {run} has {seen.layers[0].shape[-2]} of the queries of its "
                "text, and none in these parts.\n"
                "    Name those that ask, counted from the first of them: --query last=0:4"
            ) from error
    if beyond is not None:
        shares = _shares_beyond(shares, beyond)
    if as_json:
        write_json(_as_json(seen, shares, per))
    elif per == "total":
        _write_total(shares, no_sinks=no_sinks)
    else:
        sys.stdout.write(shares.table(per).text() + "\n")


def _write_total(shares: "Shares", *, no_sinks: bool) -> None:
    """Write the mean over all heads as a table, and how to leave out sinks if they count."""
    from regard.view.terminal.share_grid import share_lines

    width = shutil.get_terminal_size().columns
    sys.stdout.writelines(f"{line}\n" for line in share_lines(shares, width))
    if not no_sinks:
        sys.stdout.write("\nSinks draw attention from every part; --no-sinks leaves them out.\n")


def _as_json(
    seen: "Recording", shares: "Shares", per: Literal["total", "layer", "head"]
) -> dict[str, Any]:
    """Return the shares as lists and dictionaries: positions from 0, shares from 0 to 1."""
    return {
        "model": seen.model,
        "layers": shares.layers,
        "refused": refusals(seen),
        "sinks_left_out": shares.sinks,
        "beyond": shares.over,
        "shares": shares.table(per).records(),
    }


def _shares_beyond(shares: "Shares", name: str) -> "Shares":
    if name not in shares.queries or len(shares.queries) < 2:
        raise ValueError(
            f"beyond is {name!r}; it must be the name of one of at least two queries, which are "
            f"{', '.join(map(repr, shares.queries))}.\n"
            "    Name both, for example: --query before=40:42 --query answer=42:50 --beyond before"
        )
    return shares.beyond(name)


def _parse_parts(
    option: str, given: Sequence[str], tokens: "Sequence[Token] | None"
) -> dict[str, tuple[int, int]]:
    """Parse the parts: ``name=start:stop`` or ``name=pattern``."""
    found: dict[str, tuple[int, int]] = {}
    for written in given:
        name, what = parse_named(option, written, "NAME=START:STOP or NAME=PATTERN")
        if name in found:
            raise ValueError(
                f"{option} has {name!r} twice; each name must stand for one part.\n"
                f"    Choose another name for the second one: --{option} '{name} 2={what}'."
            )
        numbers = _RANGE.fullmatch(what)
        if numbers is None:
            found |= _find_pattern(name, what, tokens)
            continue
        found[name] = start, stop = int(numbers[1]), int(numbers[2])
        if tokens is not None and not start < stop <= len(tokens):
            counted = "tokens" if option == "part" else "queries"
            raise ValueError(
                f"{option} is {written!r}; START must be below STOP, and STOP at most "
                f"{len(tokens)}, the number of {counted}.\n"
                f"    For the first one alone write --{option} 'first=0:1'."
            )
    return found


def _find_pattern(
    name: str, pattern: str, tokens: "Sequence[Token] | None"
) -> dict[str, tuple[int, int]]:
    from regard.text import spans

    try:
        return spans.by_pattern(tokens, {name: pattern})
    except ValueError as error:
        # The library's remedy is Python.
        what, _, _ = str(error).partition("\n")
        raise ValueError(
            f"{what}\n    Pass a regular expression that matches the text, with \\ before a "
            "character with a special meaning; or its tokens, START:STOP."
        ) from error
