"""The arguments and options that several commands take."""

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regard.models.pretrained import Pretrained

__all__ = [
    "AsJson",
    "Chat",
    "Device",
    "Dtype",
    "FirstHead",
    "FirstLayer",
    "Generate",
    "Heads",
    "Layers",
    "MaxTokens",
    "Model",
    "Open",
    "Run",
    "Text",
    "TextFile",
    "Values",
    "cut_to_tokens",
    "parse_positions",
]

_PLACES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


class Number(StrEnum):
    """The dtypes in which a model can run."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Text = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT",
        help="Text for the model. - reads standard input, and so does a pipe.",
        show_default=False,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the text from this file."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A recording from regard record.")]
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="NAME", help="A Hugging Face model: its name or its folder."
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Device of the model: cpu, cuda, mps.")
]
Dtype = Annotated[
    Number | None,
    typer.Option("--dtype", help="Dtype of the weights. Default: the dtype of the file."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, metavar="N", help="Cut the text to its first N tokens."),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Wrap the text as a user's message in the chat template.")
]
Generate = Annotated[
    int, typer.Option("--generate", min=0, metavar="N", help="Let the model write N more tokens.")
]
Values = Annotated[
    bool,
    typer.Option("--values", help="Also record the value of each layer, for its output."),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers", metavar="PLACES", help="Record these layers only: 0,5-7.", show_default=False
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        "--heads", metavar="PLACES", help="Record these heads only: 0,3.", show_default=False
    ),
]
FirstLayer = Annotated[
    int | None, typer.Option("--layer", min=0, metavar="N", help="Open the page at this layer.")
]
FirstHead = Annotated[
    int | None,
    typer.Option("--head", min=0, metavar="N", help="Open the page at this head of the layer."),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def parse_positions(option: str, written: str | None) -> list[int] | None:
    """Return the positions that an option names.

    Args:
        option: its name, for the error.
        written: as in a shell; None stays None.

    Raises:
        ValueError: it is not a list of positions.

    Example:
        >>> from regard.cli.options import parse_positions
        >>> parse_positions("layers", "0,5-7")
        [0, 5, 6, 7]
    """
    if written is None:
        return None
    if not _PLACES.fullmatch(written.replace(" ", "")):
        raise ValueError(
            f"{option} is {written!r}; it must be positions, counted from 0.\n"
            f"    Write for example: --{option} 0,5-7"
        )
    found: set[int] = set()
    for part in written.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if int(last or first) - int(first) > 10_000:
            raise ValueError(f"{option} is {written!r}; the largest position is too large.")
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def cut_to_tokens(pretrained: Pretrained, text: str, max_tokens: int | None) -> str:
    """Return the text, cut to its first tokens with a warning on standard error.

    Args:
        pretrained: whose tokens they are.
        text: that was given.
        max_tokens: how many are kept at most, special ones included; all when None.
    """
    if max_tokens is None:
        return text
    cut = pretrained.first_tokens(text, max_tokens)
    if cut != text:
        sys.stderr.write(
            f"regard: the text is cut to its first {max_tokens:,} tokens: {len(cut):,} of "
            f"{len(text):,} characters\n"
        )
    return cut
