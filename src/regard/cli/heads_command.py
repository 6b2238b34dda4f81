"""``regard heads``: the kind of every head."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from regard.analysis.head_classes import Trial, classify, head_table
from regard.analysis.head_kinds import Head
from regard.cli.options import AsJson, Device, Dtype, MaxTokens, TextFile, cut_to_tokens
from regard.cli.output_files import write_json
from regard.cli.progress import progress
from regard.cli.recording_argument import open_recording
from regard.cli.text_argument import read_text
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.models.trials import needle, repetition
from regard.recording.recording import Recording
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
        metavar="[RUN]", help="A recording from regard record; --model runs a model instead."
    ),
]
Words = Annotated[
    str | None,
    typer.Option(
        "--text",
        "-t",
        metavar="TEXT",
        help="Text for the model. Default: a short story.",
        show_default=False,
    ),
]
ModelToRun = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help=f"A Hugging Face model: its name or its folder; {DEFAULT_MODEL} without RUN.",
        show_default=False,
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


class _ClassifiedHeads(NamedTuple):
    """A recording, and the kinds of its heads."""

    seen: Recording
    heads: tuple[Head, ...]

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens, or None if the recording has none."""
        tokens = self.seen.key_tokens
        return None if tokens is None else len(tokens)


def heads(
    run: Recorded = None,
    model: ModelToRun = None,
    text: Words = None,
    file: TextFile = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    no_trials: NoTrials = False,
    every: All = False,
    as_json: AsJson = False,
) -> None:
    """Show the kind of every head of a recording or a model."""
    words = None if text is None and file is None else check_text(read_text(text, file))
    if run is not None:
        _check_recording(run, model, words)
    with progress() as report:
        report(f"opening {run or model or DEFAULT_MODEL}")
        if run is not None:
            found = _classify_recording(run, report)
        else:
            pretrained = Pretrained.load(model or DEFAULT_MODEL, device=device, dtype=dtype)
            words = cut_to_tokens(pretrained, words or _TEXT, max_tokens)
            found = _classify_model(pretrained, words, not no_trials, report)
    if as_json:
        write_json(_as_json(found))
    elif every:
        sys.stdout.write(head_table(found.heads).text() + "\n")
    else:
        _show(found)


def _check_recording(run: Path, model: str | None, words: str | None) -> None:
    """Raise an error for a model in place of a recording, and for two subjects."""
    if run.is_dir() or not (run.exists() or run.suffix == ".safetensors"):
        raise ValueError(
            f"{run} is not a recording.\n"
            f"    For the heads of a model write: regard heads --model {run}"
        )
    given = "--model" if model is not None else "a text" if words is not None else None
    if given is not None:
        raise ValueError(
            f"{given} cannot be combined with the recording {run}.\n    Leave out one of them."
        )


def _classify_recording(path: Path, report: Callable[..., None]) -> _ClassifiedHeads:
    seen = open_recording(path)
    report_progress = partial(report, "asking every head")
    heads = classify(seen.layers, seen.query_tokens, seen.key_tokens, progress=report_progress)
    return _ClassifiedHeads(seen, heads)


def _classify_model(
    pretrained: Pretrained, words: str, trying: bool, report: Callable[..., None]
) -> _ClassifiedHeads:
    seen = pretrained.observe(words, progress=partial(report, "reading the text"))
    trials: list[Trial] = []
    if trying:
        report("reading random tokens twice")
        trials += _repetition_trials(pretrained)
        if pretrained.limit >= _NEEDLE_LENGTH:
            report("looking for a needle in a long text")
            trials.append(needle(pretrained.model, pretrained.tokenizer, length=_NEEDLE_LENGTH))
    tokens = seen.query_tokens, seen.key_tokens
    report_progress = partial(report, "asking every head")
    return _ClassifiedHeads(
        seen, classify(seen.layers, *tokens, trials=trials, progress=report_progress)
    )


def _repetition_trials(pretrained: Pretrained) -> list[Trial]:
    """Run the trial of repeated tokens, unless the model reads too few tokens."""
    trials = repetition(pretrained.model, limit=pretrained.limit)
    if not trials:
        sys.stderr.write(
            f"regard: {pretrained.name} reads at most {pretrained.limit} tokens: induction and "
            "duplicate token left out\n"
        )
    return trials


def _show(found: _ClassifiedHeads) -> None:
    title = visible(found.seen.model) or "a model"
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(HeadsView(title, found.num_tokens, found.heads))


def _as_json(found: _ClassifiedHeads) -> dict[str, Any]:
    return {
        "model": found.seen.model,
        "tokens": found.num_tokens,
        "layers": list(found.seen),
        "heads": [{"name": head.name, **asdict(head)} for head in found.heads],
    }
