"""``regard heads``: the kind of every head."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from regard.cli.options import AsJson, Input, Report, TextOptions, option, read_input, with_options
from regard.cli.output_files import print_lines, refusals, write_json
from regard.text.escaping import visible

if TYPE_CHECKING:
    from regard.analysis.head_classes import Trial
    from regard.models.pretrained import Pretrained

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

NoTrials = Annotated[
    bool,
    option(
        "--no-trials", "Skip the trials, which find induction, duplicate-token and retrieval heads."
    ),
]
All = Annotated[bool, option("--all", "Print every head with all its scores.")]


@with_options
def heads(
    options: TextOptions,
    text: Input = None,
    no_trials: NoTrials = False,
    every: All = False,
    as_json: AsJson = False,
) -> None:
    """Show the kind of every head of a recording, or of a model that reads a text.

    Without a text the model reads a short story.
    """
    from dataclasses import asdict

    from regard.analysis.head_classes import classify, head_table, trials_of
    from regard.cli.progress import progress
    from regard.view.terminal.head_grid import heads_lines

    with progress() as report:

        def run_trials(pretrained: "Pretrained") -> "list[Trial]":
            return [] if no_trials else _trials(pretrained, report)

        seen = options.read(_TEXT if text is None else read_input(text), report, run_trials)
        asking = partial(report, "asking every head")
        tokens = seen.query_tokens, seen.key_tokens
        found = classify(seen.layers, *tokens, trials=trials_of(seen), progress=asking)
    num_tokens = None if seen.key_tokens is None else len(seen.key_tokens)
    if as_json:
        write_json(
            {
                "model": seen.model,
                "tokens": num_tokens,
                "layers": list(seen),
                "refused": refusals(seen),
                "heads": [{"name": head.name, **asdict(head)} for head in found],
            }
        )
    elif every:
        sys.stdout.write(head_table(found).text() + "\n")
    else:
        model = visible(seen.model) or "a model"
        print_lines(partial(heads_lines, model, num_tokens, found))


def _trials(pretrained: "Pretrained", report: Report) -> "list[Trial]":
    """Run the trials for which the model reads enough tokens."""
    from regard.models.trials import needle, repetition

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
