"""``regard segments``: how much the parts of a text attend to each other."""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

import typer

from regard.analysis.span_shares import Shares, segment_shares
from regard.cli.options import AsJson, Run
from regard.cli.output_files import write_json
from regard.cli.progress import progress
from regard.cli.recording_argument import open_recording
from regard.recording.recording import Recording
from regard.text import spans
from regard.text.tokens import Token
from regard.view.terminal.share_grid import share_lines

__all__ = ["segments"]


class By(StrEnum):
    """The parts that a text is split into."""

    SENTENCE = "sentence"
    WORD = "word"


class Per(StrEnum):
    """The subject of each row of the table."""

    TOTAL = "total"
    LAYER = "layer"
    HEAD = "head"


Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        "-p",
        metavar="NAME=WHAT",
        help="A part of the text: tokens START:STOP, or a regular expression, whose first group "
        "counts. Repeat it for more parts.",
        show_default=False,
    ),
]
Queries = Annotated[
    list[str] | None,
    typer.Option(
        "--query",
        "-q",
        metavar="NAME=WHAT",
        help="A part whose queries count, as for --part. Default: all parts.",
        show_default=False,
    ),
]
Cut = Annotated[
    By | None, typer.Option("--by", help="Split the whole text into these.", show_default=False)
]
NoSinks = Annotated[
    bool,
    typer.Option("--no-sinks", help="Exclude the first token and special tokens, and renormalise."),
]
Beyond = Annotated[
    str | None,
    typer.Option(
        "--beyond",
        metavar="NAME",
        help="Subtract the shares of this query part from those of the others.",
        show_default=False,
    ),
]
Rows = Annotated[
    Per, typer.Option("--per", help="One row for the mean, for each layer, or for each head.")
]

_RANGE = re.compile(r"(\d+):(\d+)")


def segments(
    run: Run,
    parts: Parts = None,
    queries: Queries = None,
    by: Cut = None,
    no_sinks: NoSinks = False,
    beyond: Beyond = None,
    per: Rows = Per.TOTAL,
    as_json: AsJson = False,
) -> None:
    """Show how much the parts of a text attend to each other."""
    if not run.exists():
        raise FileNotFoundError(2, "No such file or directory", str(run))
    if (by is None) == (not parts):
        raise ValueError(
            "segments needs either --by or --part, and not both.\n"
            "    Run for example: regard segments RUN --by sentence\n"
            "                 or: regard segments RUN --part 'question=Who .*' --part 'doc=0:40'"
        )
    with progress() as report:
        report(f"opening {run}")
        seen = open_recording(run)
        cut = (
            _split(by, seen.key_tokens)
            if by
            else _parse_parts("part", parts or [], seen.key_tokens)
        )
        if not queries and not _has_recorded_queries(cut, seen):
            raise ValueError(
                f"query is missing; {run} has {len(seen.query_tokens or ())} of the queries of its "
                "text, and none in these parts.\n"
                "    Name those that ask, counted from the first of them: --query last=0:4"
            )
        asking = _parse_parts("query", queries, seen.query_tokens) if queries else None
        shares = segment_shares(
            seen,
            cut,
            queries=asking,
            sinks=not no_sinks,
            progress=partial(report, "asking every layer"),
        )
    drawn = shares if beyond is None else _shares_beyond(shares, beyond)
    if as_json:
        write_json(_as_json(seen, drawn, per))
    elif per is Per.TOTAL:
        width = shutil.get_terminal_size().columns
        sys.stdout.writelines(f"{line}\n" for line in share_lines(drawn, width))
    else:
        sys.stdout.write(drawn.table(_per(per)).text() + "\n")


def _shares_beyond(drawn: Shares, name: str) -> Shares:
    if name not in drawn.queries or len(drawn.queries) < 2:
        raise ValueError(
            f"beyond is {name!r}; it must be the name of one of at least two queries, which are "
            f"{', '.join(map(repr, drawn.queries))}.\n"
            "    Name both, for example: --query before=40:42 --query answer=42:50 --beyond before"
        )
    return drawn.beyond(name)


def _per(per: Per) -> Literal["head", "layer", "total"]:
    return per.value


def _split(by: By, tokens: Sequence[Token] | None) -> dict[str, tuple[int, int]]:
    return spans.by_sentence(tokens) if by is By.SENTENCE else spans.by_word(tokens)


def _has_recorded_queries(parts: Mapping[str, tuple[int, int]], seen: Recording) -> bool:
    """Return True if the parts contain recorded queries."""
    if all(layer.queries is None for layer in seen.layers):
        return seen.query_tokens == seen.key_tokens
    rows = [layer.positions for layer in seen.layers if layer.reads_itself]
    return len(rows) == len(seen.layers) and any(
        start < kept.stop and stop > kept.start for kept in rows for start, stop in parts.values()
    )


def _parse_parts(
    option: str, given: Sequence[str], tokens: Sequence[Token] | None
) -> dict[str, tuple[int, int]]:
    """Parse the parts: ``name=start:stop`` or ``name=pattern``."""
    found: dict[str, tuple[int, int]] = {}
    for written in given:
        name, equals, what = written.partition("=")
        if not (name and equals and what):
            raise ValueError(
                f"{option} is {written!r}; it must be NAME=START:STOP or NAME=PATTERN.\n"
                f"    Write for example --{option} 'question=Who .*'."
            )
        if name in found:
            raise ValueError(
                f"{option} has {name!r} twice; each name must stand for one part.\n"
                f"    Choose another name for the second one: --{option} '{name} 2={what}'."
            )
        numbers = _RANGE.fullmatch(what)
        if numbers:
            found[name] = _range(option, written, numbers, tokens)
        else:
            found |= _find_pattern(name, what, tokens)
    return found


def _range(
    option: str, written: str, numbers: re.Match[str], tokens: Sequence[Token] | None
) -> tuple[int, int]:
    start, stop = int(numbers[1]), int(numbers[2])
    if tokens is not None and not start < stop <= len(tokens):
        counted = "tokens" if option == "part" else "queries"
        raise ValueError(
            f"{option} is {written!r}; START must be below STOP, and STOP at most {len(tokens)}, "
            f"the number of {counted}.\n"
            f"    For the first one alone write --{option} 'first=0:1'."
        )
    return start, stop


def _find_pattern(
    name: str, pattern: str, tokens: Sequence[Token] | None
) -> dict[str, tuple[int, int]]:
    try:
        return spans.by_pattern(tokens, {name: pattern})
    except ValueError as error:
        # The library's remedy is Python.
        what, _, _ = str(error).partition("\n")
        raise ValueError(
            f"{what}\n    Pass a regular expression that matches the text, with \\ before a "
            "character with a special meaning; or its tokens, START:STOP."
        ) from error


def _as_json(seen: Recording, drawn: Shares, per: Per) -> dict[str, Any]:
    return {
        "model": seen.model,
        "layers": list(drawn.layers),
        "sinks_left_out": list(drawn.sinks),
        "beyond": drawn.over,
        "shares": drawn.table(_per(per)).records(),
    }
