"""The arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "HeadOfLayer", "Layer", "Model", "Output", "Text", "TextFile", "Top"]

Text = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT",
        help="What the model reads; - is standard input, which is also read when piped.",
        show_default=False,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the text from this file."),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="NAME", help="A Hugging Face model: its name or its folder."
    ),
]
Layer = Annotated[
    int | None, typer.Option(min=0, metavar="PLACE", help="Show this layer only, counted from 0.")
]
HeadOfLayer = Annotated[
    int | None,
    typer.Option(min=0, metavar="PLACE", help="Show this head of the layer only, counted from 0."),
]
Top = Annotated[
    int, typer.Option(min=1, metavar="COUNT", help="How many tokens to name for each token.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the page to this file: attention.html, or none with --json.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print numbers for programs, and nothing else.")
]
