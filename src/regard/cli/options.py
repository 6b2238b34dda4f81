"""The arguments and options that several commands take, and what they stand for.

The library is imported where it is used: ``regard --help`` must not wait for PyTorch.
"""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_type_hints

import typer

from regard.cli.output_files import report_refused

if TYPE_CHECKING:
    from regard import vllm
    from regard.analysis.head_classes import Trial
    from regard.models.pretrained import Pretrained
    from regard.recording.recording import Recording

Report: TypeAlias = Callable[..., None]
"""Reports progress: ``report(what, done, total)``."""
Trials: TypeAlias = "Callable[[Pretrained], list[Trial]]"

# More than any model reads, and little enough to be read into memory without a thought.
_MOST_BYTES = 64 * 2**20
_PLACES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_FILE = ".safetensors"
_TEXT_FILE = re.compile(r"\S+\.(txt|md)")


def option(usage: str, text: str, **limits: Any) -> Any:
    """Return an option of the command line.

    Args:
        usage: its names and what stands for its value, as in its help: ``--output -o FILE``.
        text: its help.
        limits: of its value, as typer has them: ``min=1``.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    metavar = words[-1] if len(words) > len(names) else None
    return typer.Option(*names, metavar=metavar, help=text, **limits)


Input = Annotated[
    str | None,
    typer.Argument(
        metavar="INPUT",
        help="A text in quotes, a text file, or a recording. - and a pipe are standard input.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A recording from regard record.")]
Layers = Annotated[str | None, option("--layers PLACES", "Record these layers only: 0,5-7.")]
Heads = Annotated[str | None, option("--heads PLACES", "Record these heads only: 0,3.")]
Limit = Annotated[
    int,
    option(
        "--limit MIB", "The size of the page at most. In a larger one more layers are exact.", min=1
    ),
]
Server = Annotated[
    str | None,
    option(
        "--server URL",
        "Read with the model of this vllm serve, which has regard's plugin and REGARD_TOKEN.",
    ),
]
Output = Annotated[Path | None, option("--output -o FILE", "Write a page to this file.")]
Open = Annotated[bool, option("--open", "Open the page in a browser.")]
Image = Annotated[
    Path | None, option("--image FILE", "A picture, for dinov2-small or --model NAME.")
]
NoPicture = Annotated[
    bool, option("--no-picture", "Keep the size of a picture only, not its content.")
]
Strict = Annotated[
    bool, option("--strict", "Fail if a layer was refused, instead of naming it on standard error.")
]
AsJson = Annotated[bool, option("--json", "Print JSON and nothing else.")]


@dataclass(frozen=True)
class ModelOptions:
    """The options that choose a model."""

    model: Annotated[
        str | None,
        option(
            "--model -m NAME",
            "A Hugging Face model, its name or its folder, or smollm2. Default: all-MiniLM-L6-v2.",
        ),
    ] = None
    device: Annotated[str, option("--device DEVICE", "Device of the model: cpu, cuda, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("--dtype", "Dtype of the weights. Default: the dtype of the file."),
    ] = None
    max_tokens: Annotated[
        int | None, option("--max-tokens N", "Cut a text to its first N tokens.", min=1)
    ] = None

    @property
    def name(self) -> str:
        """The name of the model."""
        from regard.models.pretrained import DEFAULT_MODEL

        return self.model or DEFAULT_MODEL

    def load(self) -> "Pretrained":
        """Load the model."""
        from regard.models.pretrained import Pretrained

        _leave_refused_to_us()
        return Pretrained.load(self.name, device=self.device, dtype=self.dtype)

    def cut(self, pretrained: "Pretrained", text: str) -> str:
        """Cut a text to its first tokens with a warning."""
        if self.max_tokens is None:
            return text
        cut = pretrained.first_tokens(text, self.max_tokens)
        if cut != text:
            sys.stderr.write(
                f"regard: the text is cut to its first {self.max_tokens:,} tokens: {len(cut):,} of "
                f"{len(text):,} characters\n"
            )
        return cut

    def check_alone(self, run: Path) -> None:
        """Raise an error if an option of a model is named together with a recording."""
        self._refuse({"strict", "no_picture"}, f"the recording {run}")

    def check_served(self) -> None:
        """Raise an error if an option of a model that runs here is named together with a server."""
        allowed = {"strict", "no_picture", "generate", "layers", "heads"}
        self._refuse(allowed, "--server, whose model is loaded")

    def _refuse(self, allowed: set[str], subject: str) -> None:
        for each in fields(self):
            if each.name not in allowed and getattr(self, each.name) != each.default:
                raise ValueError(
                    f"--{each.name.replace('_', '-')} cannot be combined with {subject}.\n"
                    "    Leave out one of them."
                )


@dataclass(frozen=True)
class TextOptions(ModelOptions):
    """The options that choose a model, and how it reads a text."""

    strict: Strict = False

    def read(
        self, words: str | Path, report: Report, trials: "Trials | None" = None, **how: Any
    ) -> "Recording":
        """Open a recording, or let a model read a text; one line names refused layers.

        Args:
            words: the text, or the path of the recording.
            report: reports progress.
            trials: runs the trials of the model, ``quick_trials`` when left out.
            how: more of the arguments of ``Pretrained.observe``.
        """
        if isinstance(words, Path):
            self.check_alone(words)
            return open_recording(words, strict=self.strict)
        report(f"loading {self.name}")
        pretrained = self.load()
        words = self.cut(pretrained, words)

        def report_layers(done: int, total: int | None) -> None:
            is_written = done == total and how.get("path") is not None
            what = f"writing {how['path']}" if is_written else f"running {self.name}"
            report(what, done, total)

        run = trials or quick_trials
        seen = pretrained.observe(
            words, progress=report_layers, strict=self.strict, trials=run(pretrained), **how
        )
        report_refused(seen)
        return seen


@dataclass(frozen=True)
class RecordOptions(TextOptions):
    """The options that choose a model, its text, and what is recorded of it."""

    chat: Annotated[
        bool, option("--chat", "Wrap the text as a user's message in the chat template.")
    ] = False
    generate: Annotated[
        int, option("--generate N", "Let the model write N more tokens.", min=0)
    ] = 0
    layers: Layers = None
    heads: Heads = None
    values: Annotated[
        bool, option("--values", "Also record the value of each layer, for its output.")
    ] = False
    image: Image = None
    no_picture: NoPicture = False

    def observe(
        self, words: str | Path | None, report: Report, path: Path | None = None
    ) -> "Recording":
        """Open a recording, or let a model read a text, a picture or both.

        Args:
            words: the text, the path of the recording, or None with a picture.
            report: reports progress.
            path: saves the recording in this file.
        """
        how: dict[str, Any] = {
            "keep": "qkv" if self.values else "qk",
            "heads": parse_positions("heads", self.heads),
            "generate": self.generate,
        }
        if self.image is not None or words is None:
            seen = self._observe_picture(words, report, how)
            if path is not None:
                report(f"writing {path}")
                seen.save(path)
            return seen
        how |= {"layers": parse_positions("layers", self.layers), "chat": self.chat, "path": path}
        seen = self.read(words, report, partial(quick_trials, writes=self.generate > 0), **how)
        if self.no_picture:
            seen.forget_pixels()
        return seen

    def _observe_picture(
        self, given: str | Path | None, report: Report, how: dict[str, Any]
    ) -> "Recording":
        from regard.images.picture import decode
        from regard.models.pretrained_vision import DEFAULT_VISION_MODEL, PretrainedVision

        if self.image is None or (self.model is None and given is not None):
            raise ValueError(
                "--image needs a model that reads pictures and texts.\n    Write: --model NAME"
            )
        if self.generate and given is None:
            raise ValueError("--generate needs a text beside --image.\n    Give a question.")
        if self.layers is not None or self.max_tokens is not None or self.chat:
            raise ValueError(
                "--image excludes --layers, --max-tokens and --chat.\n    Leave them out."
            )
        text = None if given is None else text_of(str(given))
        name, reads_text = self.model or DEFAULT_VISION_MODEL, text is not None
        report(f"loading and running {name}")
        picture = decode(self.image)
        _leave_refused_to_us()
        vision = PretrainedVision.load(
            name, reads_text=reads_text, device=self.device, dtype=self.dtype
        )
        seen = vision.observe(picture, text, data=not self.no_picture, strict=self.strict, **how)
        report_refused(seen)
        return seen


def _leave_refused_to_us() -> None:
    """Silence warnings about refused layers: report_refused writes one line about them."""
    from regard.errors import RefusedWarning

    warnings.filterwarnings("ignore", category=RefusedWarning)


def quick_trials(pretrained: "Pretrained", *, writes: bool = False) -> "list[Trial]":
    """Run the trials that take a moment, so that every command has one name for a head.

    Args:
        pretrained: the model.
        writes: if True, run the model that writes, in place of the one that reads.
    """
    from regard.models.trials import repetition

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text raises the same ones
        return repetition(pretrained.writer if writes else pretrained.model, limit=pretrained.limit)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its options as options of the command line."""
    first, *others = inspect.signature(command).parameters.values()
    group, kind = first.annotation, inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(group, include_extras=True)
    parameters = [
        *(other.replace(kind=kind) for other in others),
        *(
            inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name])
            for each in fields(group)
        ),
    ]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        options = group(**{name: given.pop(name) for name in hints})
        command(options, **given)

    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return expanded


def read_input(given: str | None) -> str | Path:
    """Return the text that an argument means, or the path of a recording.

    Args:
        given: a text, the name of a text file or of a recording; "-" and None are standard input.

    Raises:
        ValueError: it is no text, too long, or missing; or it names a model or a folder.
    """
    from regard.models.pretrained import NAMED_MODELS, check_text

    if given is None or given == "-":
        return check_text(_standard_input(is_asked=given == "-"))
    if given in NAMED_MODELS:
        raise ValueError(f"{given} is a model.\n    Write: --model {given}")
    if not given.strip():
        return check_text(given)
    path = Path(given)
    if given.endswith(_FILE) and "\n" not in given:
        return path
    try:
        is_folder = path.is_dir()
        is_text = not path.exists() and not _TEXT_FILE.fullmatch(given)  # then it is missing
    except (OSError, ValueError):  # no path can be as long, or has a zero
        is_folder, is_text = False, True
    if is_folder:
        raise ValueError(
            f"{given} is a folder; it must be a text, a text file or a recording.\n"
            f"    For a model write: --model {given}"
        )
    if is_text:
        return check_text(given)
    with path.open("rb") as opened:
        return check_text(_decoded(opened.read(_MOST_BYTES + 1), given))


def text_of(given: str | None) -> str:
    """Return the text that an argument means, as ``read_input``, for what runs a model.

    Raises:
        ValueError: it is a recording.
    """
    text = read_input(given)
    if isinstance(text, Path):
        raise ValueError(
            f"{text} is a recording; it must be a text or a text file.\n"
            f"    To look at the recording write: regard see {text}"
        )
    return text


def reach(url: str) -> "vllm.Server":
    """Return the server at an address; its token is that of REGARD_TOKEN."""
    from regard.errors import RegardError

    try:
        from regard.vllm import Server as Reached
    except ModuleNotFoundError as missing:
        raise RegardError(
            f"--server needs {missing.name}, which is not installed.\n"
            "    Run: pip install 'regard[models]'"
        ) from None
    return Reached(url)


def open_recording(run: Path, *, strict: bool = False, no_picture: bool = False) -> "Recording":
    """Load the recording of a file, which must have at least one layer.

    Args:
        run: the file.
        strict: if True, raise an error if layers were refused; otherwise one line names them.
        no_picture: if True, leave out the content of pictures.
    """
    from regard.errors import RegardError
    from regard.recording.file_reader import load

    if not run.is_dir():
        run.open("rb").close()
    seen = load(run)
    if not seen.layers:
        raise RegardError(f"{run} has no layers.\n    Record a model with regard record.")
    report_refused(seen, strict=strict)
    if no_picture:
        seen.forget_pixels()
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


def parse_positions(option: str, written: str | None) -> Sequence[int] | None:
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


def _standard_input(*, is_asked: bool) -> str:
    # Without any standard input, as under some schedulers, Python has None there.
    if sys.stdin is None or (not is_asked and sys.stdin.isatty()):
        raise ValueError(
            "text is missing.\n"
            '    Pass it in quotes, for example "Life is short", as a file, or through a pipe.'
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
