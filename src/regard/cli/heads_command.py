"""``regard heads``: the kind of every head."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from regard.analysis.head_classes import Trial, classify, head_table
from regard.cli.options import (
    AsJson,
    Strict,
    TextOption,
    TextOptions,
    open_recording,
    with_options,
)
from regard.cli.output_files import report_refused, write_json
from regard.cli.progress import progress
from regard.models.pretrained import Pretrained
from regard.models.trials import needle, repetition
from regard.text.escaping import visible
from regard.view.terminal.head_grid import HeadsView

__all__ = ["heads"]

# Long enough for heads that look far back, and about nothing that a model would know by heart.
_TEXT = (
    "The harbour was quiet that morning. Two boats had left before sunrise, and the third was"
    " still tied to the wall because its engine would not start. Marta sat on the steps with "
    "a cup of tea and watched the mechanic, who was her cousin, take the cover off for the "
    'second time. "It is not the fuel," he said, "and it is not the battery." She nodded, '
    "although she knew nothing about engines. When the ferry came in, its wake lifted the "
    "boat, the cable scraped along the stone, and something under the cover gave a small "
    "click. The mechanic looked at her. Then he turned the key, and the engine started as if "
    "nothing had ever been wrong with it."
)
_NEEDLE_LENGTH = 512

Recorded = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="A recording from regard record. Without it, a model reads --text, or a short story.",
    ),
]
NoTrials = Annotated[
    bool,
    typer.Option(
        "--no-trials",
        help="Skip the trials, which find induction, duplicate-token and retrieval heads.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Print every head with all its scores.")]


@with_options
def heads(
    options: TextOptions,
    run: Recorded = None,
    text: TextOption = None,
    no_trials: NoTrials = False,
    every: All = False,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Show the kind of every head of a recording or a model."""
    has_text = text is not None or options.file is not None
    words = options.read(text) if has_text else _TEXT
    if run is not None:
        _check_recording(run, options.model, has_text)
    trials: list[Trial] = []
    with progress() as report:
        if run is not None:
            seen = open_recording(run, strict=strict)
        else:
            report(f"opening {options.name}")
            pretrained, words = options.load_for(words)
            reading = partial(report, "reading the text")
            seen = pretrained.observe(words, progress=reading, strict=strict)
            report_refused(seen)
            if not no_trials:
                trials = _trials(pretrained, report)
        asking = partial(report, "asking every head")
        tokens = seen.query_tokens, seen.key_tokens
        found = classify(seen.layers, *tokens, trials=trials, progress=asking)
    num_tokens = None if seen.key_tokens is None else len(seen.key_tokens)
    if as_json:
        named = [{"name": head.name, **asdict(head)} for head in found]
        write_json(
            {
                "model": seen.model,
                "tokens": num_tokens,
                "layers": list(seen),
                "refused": [refusal._asdict() for refusal in seen.refused],
                "heads": named,
            }
        )
    elif every:
        sys.stdout.write(head_table(found).text() + "\n")
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(HeadsView(visible(seen.model) or "a model", num_tokens, found))


def _check_recording(run: Path, model: str | None, has_text: bool) -> None:
    """Raise an error for a model in place of a recording, and for two subjects."""
    if run.is_dir() or not (run.exists() or run.suffix == ".safetensors"):
        raise ValueError(
            f"{run} is not a recording.\n"
            f"    For the heads of a model write: regard heads --model {run}"
        )
    if model is not None or has_text:
        raise ValueError(
            f"{'a text' if model is None else '--model'} cannot be combined with the recording "
            f"{run}.\n    Leave out one of them."
        )


def _trials(pretrained: Pretrained, report: Callable[..., None]) -> list[Trial]:
    """Run the trials for which the model reads enough tokens."""
    report("reading random tokens twice")
    trials = repetition(pretrained.model, limit=pretrained.limit)
    if not trials:
        sys.stderr.write(
            f"regard: {pretrained.name} reads at most {pretrained.limit} tokens: induction and "
            "duplicate token left out\n"
        )
    if pretrained.limit >= _NEEDLE_LENGTH:
        report("looking for a needle in a long text")
        trials.append(needle(pretrained.model, pretrained.tokenizer, length=_NEEDLE_LENGTH))
    return trials
