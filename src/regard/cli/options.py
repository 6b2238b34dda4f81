"""The arguments and options that several commands take, and what they stand for."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from regard.cli.output_files import report_refused
from regard.errors import RegardError
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.recording.file_reader import load
from regard.recording.recording import Recording

__all__ = [
    "AsJson",
    "Device",
    "Dtype",
    "Heads",
    "Layers",
    "ModelOptions",
    "Open",
    "RecordOptions",
    "Run",
    "Strict",
    "Text",
    "TextOption",
    "TextOptions",
    "open_recording",
    "parse_named",
    "parse_positions",
    "with_options",
]

# More than any model reads, and little enough to be read into memory without a thought.
_MOST_BYTES = 64 * 2**20
_PLACES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")

Text = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT", help="Text for the model. - reads standard input, and so does a pipe."
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text", "-t", metavar="TEXT", help="Text for the model. - reads standard input."
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A recording from regard record.")]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Device of the model: cpu, cuda, mps.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Dtype of the weights. Default: the dtype of the file."),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="PLACES", help="Record these layers only: 0,5-7."),
]
Heads = Annotated[
    str | None, typer.Option("--heads", metavar="PLACES", help="Record these heads only: 0,3.")
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Fail if a layer was refused, instead of naming it on standard error."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True)
class ModelOptions:
    """The options that choose a model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help=f"A Hugging Face model: its name or its folder. Default: {DEFAULT_MODEL}.",
        ),
    ] = None
    device: Device = "cpu"
    dtype: Dtype = None

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.model or DEFAULT_MODEL

    def load(self) -> Pretrained:
        """Load the model."""
        return Pretrained.load(self.name, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class TextOptions(ModelOptions):
    """The options that choose a model and its text."""

    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read the text from this file."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, metavar="N", help="Cut the text to its first N tokens."
        ),
    ] = None

    def read(self, text: str | None) -> str:
        """Return the text from the argument, the file or standard input.

        Args:
            text: as an argument; "-" is standard input, which is also read for None.

        Raises:
            ValueError: both or none was given, or it is a file's name, no text, or too long.
        """
        return check_text(_read(text, self.file))

    def load_for(self, text: str) -> tuple[Pretrained, str]:
        """Load the model, and cut the text to its first tokens with a warning."""
        pretrained = self.load()
        if self.max_tokens is None:
            return pretrained, text
        cut = pretrained.first_tokens(text, self.max_tokens)
        if cut != text:
            sys.stderr.write(
                f"regard: the text is cut to its first {self.max_tokens:,} tokens: {len(cut):,} of "
                f"{len(text):,} characters\n"
            )
        return pretrained, cut


@dataclass(frozen=True)
class RecordOptions(TextOptions):
    """The options that choose a model, its text, and what is recorded of it."""

    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the text as a user's message in the chat template.")
    ] = False
    generate: Annotated[
        int,
        typer.Option("--generate", min=0, metavar="N", help="Let the model write N more tokens."),
    ] = 0
    layers: Layers = None
    heads: Heads = None
    values: Annotated[
        bool, typer.Option("--values", help="Also record the value of each layer, for its output.")
    ] = False
    strict: Strict = False

    def observe(
        self,
        pretrained: Pretrained,
        text: str,
        path: Path | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> Recording:
        """Run a model on a text, and return its attention; as ``Pretrained.observe``."""
        seen = pretrained.observe(
            text,
            keep="qkv" if self.values else "qk",
            layers=parse_positions("layers", self.layers),
            heads=parse_positions("heads", self.heads),
            chat=self.chat,
            generate=self.generate,
            path=path,
            progress=progress,
            strict=self.strict,
        )
        report_refused(seen)
        return seen


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its options as options of the command line."""
    first, *others = inspect.signature(command).parameters.values()
    group, kind = first.annotation, inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(group, include_extras=True)
    parameters = [
        *(
            inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name])
            for each in fields(group)
        ),
        *(other.replace(kind=kind) for other in others),
    ]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        options = group(**{name: given.pop(name) for name in hints})
        command(options, **given)

    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return expanded


def open_recording(run: Path, *, strict: bool = False) -> Recording:
    """Load the recording of a file, which must have at least one layer.

    Args:
        run: the file.
        strict: if True, raise an error if layers were refused; otherwise one line names them.
    """
    if not run.is_dir():
        run.open("rb").close()
    seen = load(run)
    if not seen.layers:
        raise RegardError(f"{run} has no layers.\n    Record a model with regard record.")
    report_refused(seen, strict=strict)
    return seen


def parse_named(option: str, written: str, form: str) -> tuple[str, str]:
    """Split ``name=what``."""
    name, equals, what = written.partition("=")
    if not (name and equals and what):
        raise ValueError(
            f"{option} is {written!r}; it must be {form}.\n"
            f"    Write for example --{option} 'question=Who .*'."
        )
    return name, what


def parse_positions(option: str, written: str | None) -> list[int] | None:
    """Return the positions that an option names.

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


def _read(text: str | None, file: Path | None) -> str:
    if file is not None and text is not None:
        raise ValueError(
            "text is given twice, as an argument and with --file.\n    Leave out one of them."
        )
    if file is not None:
        with file.open("rb") as opened:
            return _decoded(opened.read(_MOST_BYTES + 1), str(file))
    if text is not None and text != "-":
        if os.path.isfile(text):  # noqa: PTH113, Path.is_file raises where a text is too long
            raise ValueError(
                f"text is {text!r}, which is the name of a file.\n"
                "    For a text file write --file; for a recording use regard segments."
            )
        return text
    # Without any standard input, as under some schedulers, Python has None there.
    if sys.stdin is None or (text is None and sys.stdin.isatty()):
        raise ValueError(
            "text is missing.\n"
            '    Pass it in quotes, for example "Life is short", with --file, or through a pipe.'
        )
    return _decoded(sys.stdin.buffer.read(_MOST_BYTES + 1), "standard input")


def _decoded(content: bytes, where: str) -> str:
    if len(content) > _MOST_BYTES:
        raise ValueError(
            f"{where} has more than {_MOST_BYTES // 2**20} MiB; longer texts are not supported.\n"
            "    Pass a part of it."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {error.start} is invalid.\n    Save the text as UTF-8."
        ) from error
