"""``regard survey``: measure every head of a model on every text of a corpus."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from regard.cli.options import AsJson, ModelOptions, option, parse_named, with_options
from regard.cli.output_files import write_json
from regard.text.escaping import visible

Corpus = Annotated[
    Path,
    typer.Argument(
        metavar="CORPUS", help="Text with one text per line, JSON lines (.jsonl) or Parquet."
    ),
]
Output = Annotated[Path, option("--output -o FOLDER", "Write Parquet files to this folder.")]
Column = Annotated[str, option("--column NAME", "The name of the texts in JSON lines, Parquet.")]
Parts = Annotated[
    list[str] | None,
    option(
        "--part -p NAME=PATTERN",
        "A column more, once for each: the share of attention on what a regular expression finds.",
    ),
]


@with_options
def survey(
    options: ModelOptions,
    corpus: Corpus,
    output: Output = Path("survey"),
    column: Column = "text",
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Measure every head on every text of a corpus, as Parquet files.

    Run it again to go on after an interruption. On many processes: torchrun --nproc-per-node 8
    -m regard survey CORPUS --model NAME.
    """
    from regard.cli.progress import progress
    from regard.corpus.surveying import survey as survey_corpus
    from regard.errors import count_text

    named = dict(parse_named("part", part, "NAME=PATTERN") for part in parts or [])
    if options.device == "cuda" and "LOCAL_RANK" in os.environ:
        options = replace(options, device=f"cuda:{os.environ['LOCAL_RANK']}")
    with progress() as report:
        report(f"loading {options.name}")
        pretrained = options.load()
        report(f"checking {corpus}")
        found = survey_corpus(
            pretrained,
            corpus,
            output,
            column=column,
            parts=named,
            max_tokens=options.max_tokens,
            progress=_with_rate(report),
        )
    files, rows = len(found.files), found.count_rows()
    if as_json:
        write_json({"path": str(output), "files": files, "rows": rows})
    else:
        name = visible(str(output))
        sys.stdout.write(f"{name}   {rows:,} rows in {count_text(files, 'Parquet file')}\n")


def _with_rate(report: Callable[..., None]) -> Callable[[int, int], None]:
    """Return a function that reports finished texts, texts per second and the time that is left."""
    begin: tuple[float, int] | None = None

    def report_rate(done: int, total: int) -> None:
        nonlocal begin
        now = monotonic()
        begin = begin or (now, done)  # finished before, or in the first batch, which is slower
        start, before = begin
        what = f"{done:,} of {total:,} texts"
        if done > before:
            rate = (done - before) / (now - start)
            left = timedelta(seconds=round((total - done) / rate))
            what += f", {rate:.3g} a second, {left} left"
        report(what, done, total)

    return report_rate
