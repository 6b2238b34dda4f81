"""Reading a recording where it lies: nothing is copied, nothing runs, everything is checked.

The file is untrusted. safetensors checks its header against its length; what the JSON in it says is
checked here, and no memory is taken for what it merely claims.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import RegardError, check_path, check_weights
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_format import Take, answers_of, apart_of, matrix_of, wrong_numbers
from regard.recording.file_writer import FORMAT, KEY
from regard.recording.layers import Answers, Layer, Origin, Queries
from regard.reductions.top_k import Top
from regard.scores.given_scores import GivenScores
from regard.text.escaping import visible
from regard.text.tokens import Token

__all__ = ["Stored", "read"]

_MOST_AXES = 16
_TOLD = 200
_LONGEST = 2**40
_WRONG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What wrong plain data raise."""


@dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds.

    Attributes:
        model: the name of the model.
        query_tokens: one token for each query; None when not known.
        key_tokens: one token for each key; None when not known.
        layers: each on the file's own bytes, which are read when they are asked for.

    Example:
        >>> from regard.recording.file_reader import Stored
        >>> Stored("Tiny", None, None, ()).model
        'Tiny'
    """

    model: str
    query_tokens: tuple[Token, ...] | None
    key_tokens: tuple[Token, ...] | None
    layers: tuple[Layer, ...]


def read(path: str | os.PathLike[str]) -> Stored:
    """The recording in a file, memory-mapped.

    Numbers are read, and checked, when a layer is first asked for.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: path is no path.
        ValueError: path is empty.
        RegardError: it is no recording, of another format, or damaged.

    Example:
        >>> import torch, regard
        >>> from regard.recording.file_reader import read
        >>> from regard.recording.file_writer import write
        >>> seen = regard.Recording({"a": regard.attend(torch.zeros(3, 4), torch.zeros(3, 4))})
        >>> write("run.safetensors", seen.layers)
        >>> [layer.name for layer in read("run.safetensors").layers]
        ['a']
    """
    path = check_path(path)
    about, tensors = _opened(path)
    if type(about["format"]) is not int or about["format"] != FORMAT:
        raise RegardError(
            f"{path} is a recording of format {_told(repr(about['format']))}; "
            f"this version of regard reads format {FORMAT}.\n"
            f"    Open it with the regard that made it, {_told(repr(about.get('regard')))}, "
            "or a newer one."
        )
    try:
        queries, keys = (_tokens(about[name]) for name in ("query_tokens", "key_tokens"))
        layers = tuple(_layer(path, plain, tensors) for plain in about["layers"])
        if len({layer.name for layer in layers}) < len(layers):
            raise ValueError("two layers have one name")
        for layer in layers:
            layer.check_tokens(queries, keys)
        return Stored(str(about["model"]), queries, keys, layers)
    except _WRONG as error:
        raise _damaged(path, _reason(error)) from error


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON of a recording, and its tensors, of which nothing is read yet."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; a recording is made with seen.save().")
    if not path.is_file():
        raise _no_recording(path, "it is a folder" if path.is_dir() else "it is no file")
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = cast(dict[str, str], file.metadata() or {})
            names = cast(list[str], file.keys())
            tensors = {name: cast(Tensor, file.get_tensor(name)) for name in names}
            about: Any = json.loads(metadata.get(KEY, "null"))
    except (safetensors.SafetensorError, OSError, *_WRONG) as error:
        raise _no_recording(path, _reason(cast(Exception, error))) from error
    if not isinstance(about, dict) or "format" not in about:
        raise _no_recording(path, "it is a safetensors file of something else")
    return cast(dict[str, Any], about), tensors


def _layer(path: Path, plain: Any, tensors: dict[str, Tensor]) -> Layer:
    name = plain["name"]
    if not isinstance(name, str):
        raise TypeError(f"a layer of the name {name!r}")
    names = plain["tensors"]
    held: dict[str, Tensor] = {}

    def take(role: object) -> Tensor:
        held[str(role).removeprefix(f"{name}/")] = tensors[names[role]]
        return tensors[names[role]]

    try:
        shape = _shape(plain["shape"])
        matrix = None if plain["matrix"] is None else matrix_of(plain["matrix"], take)
        if matrix is not None and matrix.shape != shape:
            raise ValueError(f"a matrix of shape {tuple(matrix.shape)}, not {tuple(shape)}")
        answers = answers_of(plain["answers"], shape, take)
        origin = _origin(plain["origin"], shape)
        queries = _queries(plain.get("queries"), shape)  # files of before it was kept have none
        value = _value(plain.get("value"), shape, take)
        apart = apart_of(plain.get("apart", []))
    except _WRONG as error:
        raise ValueError(f"layer {name!r}: {_reason(error)}") from error
    check = _Check(path, name, held, shape, matrix, answers)
    return Layer(name, shape, matrix, answers, origin, check, queries, value, apart)


def _origin(plain: Any, shape: torch.Size) -> Origin | None:
    if plain is None:
        return None
    place, heads = plain
    if heads is None:
        return Origin(_whole_number(place))
    if len(heads) != shape[-3]:
        raise ValueError(f"an origin of {len(heads)} heads, not {shape[-3]}")
    return Origin(_whole_number(place), tuple(map(_whole_number, heads)))


def _queries(plain: Any, shape: torch.Size) -> Queries | None:
    if plain is None:
        return None
    start, ran = map(_whole_number, plain)
    if start + shape[-2] > ran:
        raise ValueError(f"queries {start} to {start + shape[-2]} of {ran}")
    return Queries(start, ran)


def _value(plain: Any, shape: torch.Size, take: Take) -> Tensor | None:
    if plain is None:
        return None
    value = take(plain)
    fits = value.ndim == len(shape) and value.is_floating_point() and value.numel() > 0
    if not fits or (value.shape[:-3], value.shape[-2]) != (shape[:-3], shape[-1]):
        raise ValueError(f"a value of shape {tuple(value.shape)} for one of {tuple(shape)}")
    if len(shape) > 2 and shape[-3] % value.shape[-3]:
        raise ValueError(f"a value of {value.shape[-3]} heads for {shape[-3]}")
    return value


def _whole_number(plain: object) -> int:
    if type(plain) is not int or not 0 <= plain < _LONGEST:
        raise ValueError(f"a place of {plain!r}")
    return plain


class _Check:
    """Looks once through all numbers of a layer, when it is first asked for."""

    def __init__(
        self,
        path: Path,
        name: str,
        tensors: dict[str, Tensor],
        shape: torch.Size,
        matrix: AttentionMatrix | None,
        answers: Answers,
    ) -> None:
        self._where = path, name
        self._held = tensors, shape, matrix, answers
        self._sound = False

    def __call__(self) -> None:
        if not self._sound:
            path, name = self._where
            problem = _problem(*self._held)
            if problem is not None:
                raise _damaged(path, f"layer {name!r} has {problem}")
            self._sound = True


def _problem(
    tensors: dict[str, Tensor],
    shape: torch.Size,
    matrix: AttentionMatrix | None,
    answers: Answers,
) -> str | None:
    for role, tensor in tensors.items():
        if not tensor.numel():
            continue
        if (wrong := wrong_numbers(role, tensor)) is not None:
            return f"{wrong} in its {role}"
        if tensor.dtype == torch.bool and int(tensor.view(torch.uint8).amax()) > 1:
            return f"something neither true nor false in its {role}"
    for answer in answers.values():
        if isinstance(answer, Top):
            first, last = (int(each) for each in answer.indices.aminmax())
            if first < -1 or last >= shape[-1]:
                return f"a key {first if first < -1 else last} among its largest weights"
    source = None if matrix is None else matrix.source
    if isinstance(source, GivenScores) and source.are_weights:
        try:
            check_weights(source.values)
        except ValueError as error:
            return _reason(error).removeprefix("weights has ")
    return None


def _shape(plain: Any) -> torch.Size:
    sizes = cast(list[object], plain)
    right = isinstance(plain, list) and 2 <= len(sizes) <= _MOST_AXES
    if not right or not all(type(n) is int and 1 <= n <= _LONGEST for n in sizes):
        raise ValueError(f"the shape {plain!r:.60}")
    return torch.Size(cast(list[int], sizes))


def _tokens(plain: Any) -> tuple[Token, ...] | None:
    if plain is None:
        return None
    texts, special = cast(list[object], plain["text"]), set(plain["special"])
    if not isinstance(plain["text"], list) or not all(isinstance(text, str) for text in texts):
        raise TypeError("a token that is no text")
    if not special <= set(range(len(texts))):
        raise ValueError(f"special tokens that are none of its {len(texts)}")
    return tuple(Token(str(text), place in special) for place, text in enumerate(texts))


def _reason(error: BaseException) -> str:
    text = str(error).partition("\n")[0].rstrip(".")
    return f"{text} is missing" if isinstance(error, KeyError) else text


def _told(what: str) -> str:
    """What a file says, or an error says of it, is as untrusted as the file."""
    return visible(what if len(what) <= _TOLD else what[:_TOLD] + " ...")


def _damaged(path: Path, what: str) -> RegardError:
    return RegardError(
        f"{path} is damaged: {_told(what)}.\n    Take a copy of it, or record and save again."
    )


def _no_recording(path: Path, what: str) -> RegardError:
    return RegardError(
        f"{path} is no recording of regard: {_told(what)}.\n"
        '    Recordings are made with seen.save("run.safetensors"); where it is a copy of one, '
        "copy it again: it may be cut short."
    )


def _safetensors() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise RegardError(
            "load() needs safetensors, which is not installed.\n"
            "    Run: pip install 'regard[files]'"
        ) from error
    return safetensors
