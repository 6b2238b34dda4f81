"""A reader of recordings that opens a file fast and reads the tensors of each layer on demand.

The file is untrusted. No code from it runs, all its contents are checked, and sizes that it only
claims allocate no memory.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from regard.errors import RegardError, bytes_text, check_path, check_weights
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_format import (
    Take,
    answer_of,
    matrix_of,
    reduction_of,
    wrong_numbers,
)
from regard.recording.file_writer import FORMAT, KEY
from regard.recording.layers import Answers, Layer, Origin, Queries, Refusal
from regard.recording.recording import Recording, merged
from regard.recording.shard import AXES, Shard
from regard.recording.tensor_file import DamagedError, TensorFile
from regard.reductions.top_k import Top
from regard.scores.given_scores import GivenScores
from regard.text.escaping import visible
from regard.text.tokens import Token

__all__ = ["load", "read", "verify"]

Content = TypeVar("Content")

_FORMATS = range(1, FORMAT + 1)
_MOST_AXES = 16
_MOST_PARTS = 2**16
_MOST_CHARACTERS = 200
_LONGEST = 2**40
_KEPT_BYTES = 2**30  # the size of the cache of tensors
_WRONG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that invalid plain data raise."""


def load(path: str | os.PathLike[str]) -> Recording:
    """Load a recording that ``Recording.save`` or ``regard.observe`` with ``path=`` wrote.

    Opening is fast for files of any size. The tensors of a layer are read at its first use and
    compared with their checksums. No code from the file runs.

    A folder holds the parts of a distributed run, one file for each process. They are merged as by
    ``Recording.merge``.

    Args:
        path: the file, or the folder.

    Raises:
        FileNotFoundError: the file does not exist.
        RegardError: the file is not a recording, is damaged, or has a format that this version
            cannot read; or the files of the folder are not the parts of one run.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
        >>> regard.Recording({"layer": even}).save("run.safetensors")
        >>> regard.load("run.safetensors")["layer"].entropy()
        tensor([0.6931, 0.6931])
    """
    folder = check_path(path)
    if not folder.is_dir():
        return read(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RegardError(
            f"{folder} is a folder without recordings.\n"
            "    Give the path of a recording, or of the folder of a distributed run."
        )
    return merged([read(file) for file in files], [str(file) for file in files])


def read(path: str | os.PathLike[str]) -> Recording:
    """Open the recording in a file.

    The tensors of a layer are read and checked at its first use. The file stays open.

    Raises:
        FileNotFoundError: the file does not exist.
        TypeError: path is not a path.
        ValueError: path is empty.
        RegardError: the file is not a recording, has another format, or is damaged.
    """
    path = check_path(path)
    return _recording(path, *_opened(path))


def _recording(path: Path, file: TensorFile, about: dict[str, Any]) -> Recording:
    if type(about["format"]) is not int or about["format"] not in _FORMATS:
        raise RegardError(
            f"{path} is a recording of format {_shortened(repr(about['format']))}; "
            f"this version of regard reads formats 1 to {FORMAT}.\n"
            f"    Open it with the regard that made it, {_shortened(repr(about.get('regard')))}, "
            "or a newer one."
        )
    try:
        if about["format"] > 1 and not file.has_checksums:
            raise ValueError("its checksums are missing")
        queries, keys = (_tokens(about[name]) for name in ("query_tokens", "key_tokens"))
        seen = Recording({}, model=str(about["model"]), query_tokens=queries, key_tokens=keys)
        seen.refused = list(map(_refusal, about.get("refused", [])))
        seen.shard = _shard(about.get("shard"))
        recent = _Recent()
        for plain in about["layers"]:
            seen.put(_StoredLayer(file, path, recent, plain).layer)
        if len(seen.layers) < len(about["layers"]):
            raise ValueError("two layers have one name")
        return seen
    except _WRONG as error:
        raise _damaged(path, _reason(error)) from error


def _refusal(plain: Any) -> Refusal:
    module, line, reason = plain
    if not (isinstance(module, str) and isinstance(reason, str)):
        raise TypeError("a refusal that is no text")
    return Refusal(module, None if line is None else str(line), reason)


def _shard(plain: Any) -> Shard | None:
    if plain is None:
        return None
    if not isinstance(plain["run"], str) or not all(type(x) is str for x in plain["without"]):
        raise TypeError("a place in a distributed run that is no text")
    if unknown := sorted(set(plain).difference(Shard._fields)):
        raise ValueError(f"a place in a distributed run with {unknown[0]!r}, which it cannot have")
    axes: dict[str, tuple[int, int]] = {}
    for axis in AXES:
        at, count = map(_whole_number, plain[axis])
        if at >= count or count > _MOST_PARTS:
            raise ValueError(f"part {at} of {count} of its {axis}")
        axes[axis] = at, count
    return Shard(
        plain["run"], _whole_number(plain["rank"]), **axes, without=tuple(plain["without"])
    )


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> str:
    """Read every tensor of a recording, and compare it with its checksum.

    Return one line with the number of layers, the size of the file and the result. ``progress`` is
    called with the number of finished layers and the number of layers.

    Raises:
        FileNotFoundError: the file does not exist.
        RegardError: the file is not a recording, or is damaged.
    """
    path = check_path(path)
    file, about = _opened(path)
    read_layers = _recording(path, file, about).layers
    for done, layer in enumerate(read_layers, 1):
        if layer.matrix is not None:
            layer.whole()
        if layer.value is not None:
            layer.whole_value()
        for reduction in layer.answers:
            layer.reduce(reduction)
        if progress is not None:
            progress(done, len(read_layers))
    size = bytes_text(path.stat().st_size)
    layers = f"{len(read_layers)} layer{'s' * (len(read_layers) != 1)}"
    found = "has its checksum" if file.has_checksums else "can be read; format 1 has no checksums"
    return f"{layers}, {size}: every number {found}"


def _opened(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """Open a file, and return its tensors and the JSON of its recording."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; a recording is made with seen.save().")
    if not path.is_file():
        raise _no_recording(path, "it is a folder" if path.is_dir() else "it is no file")
    try:
        file = TensorFile(path)
        about: Any = json.loads(file.metadata.get(KEY, "null"))
    except DamagedError as error:
        raise _damaged(path, _reason(error)) from error
    except _WRONG as error:
        raise _no_recording(path, _reason(error)) from error
    if not isinstance(about, dict) or "format" not in about:
        raise _no_recording(path, "it is a safetensors file of something else")
    return file, cast(dict[str, Any], about)


class _Recent:
    """A cache of the matrices, values and answers that were used last, limited in bytes."""

    def __init__(self) -> None:
        self._contents: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._lock = RLock()

    def get(self, name: object, read: Callable[[], tuple[Content, int]]) -> Content:
        """Return a cached object; if it is missing, call ``read`` for it and its size in bytes."""
        with self._lock:
            if name not in self._contents:
                self._contents[name] = read()
            self._contents.move_to_end(name)
            while len(self._contents) > 1 and self._bytes() > _KEPT_BYTES:
                self._contents.popitem(last=False)
            return self._contents[name][0]

    def _bytes(self) -> int:
        return sum(size for _, size in self._contents.values())


@dataclass(frozen=True, eq=False)
class _Reading(Generic[Content]):
    """A function that reads a matrix, a value or an answer."""

    claimed: Content
    read: Callable[[], Content]

    def __call__(self) -> Content:
        return self.read()

    def __repr__(self) -> str:
        return repr(self.claimed)


class _StoredLayer:
    """A layer in a file.

    Its plain data are checked immediately, with zeros in place of large tensors.
    """

    def __init__(self, file: TensorFile, path: Path, recent: _Recent, plain: Any) -> None:
        self._file, self._path, self._recent = file, path, recent
        self._name = name = plain["name"]
        if not isinstance(name, str):
            raise TypeError(f"a layer of the name {name!r}")
        self._names = plain["tensors"]
        try:
            self._shape = shape = _shape(plain["shape"])
            answers = [
                (reduction_of(each), self._stored(number, answer_of, each))
                for number, each in enumerate(plain["answers"])
            ]
            self.layer = Layer(
                name,
                shape,
                self._stored("matrix", _matrix, plain["matrix"]),
                Answers.reading((asked, read) for asked, read in answers if read is not None),
                _origin(plain["origin"], shape),
                # Older files lack queries and values.
                _queries(plain.get("queries"), shape),
                self._stored("value", _value, plain.get("value")),
            )
        except _WRONG as error:
            raise ValueError(f"layer {name!r}: {_reason(error)}") from error

    def _stored(
        self, name: object, build: Callable[[Any, torch.Size, Take], Content], plain: Any
    ) -> "_Reading[Content] | None":
        """Return a function that reads the object of plain data; None if the data are None."""
        if plain is None:
            return None
        claimed = build(plain, self._shape, lambda role: self._file.stand_in(self._names[role]))
        key = self._name, name
        return _Reading(claimed, lambda: self._recent.get(key, lambda: self._read(build, plain)))

    def _read(
        self, build: Callable[[Any, torch.Size, Take], Content], plain: Any
    ) -> tuple[Content, int]:
        """Build an object from its tensors, and return it with its size in bytes."""
        tensors: list[Tensor] = []

        def take(role: object) -> Tensor:
            tensor = self._file.tensor(self._names[role])
            self._check(_tensor_problem(str(role).removeprefix(f"{self._name}/"), tensor))
            tensors.append(tensor)
            return tensor

        try:
            content = build(plain, self._shape, take)
        except _WRONG as error:
            raise _damaged(self._path, f"layer {self._name!r}: {_reason(error)}") from error
        self._check(_problem(content, self._shape))
        return content, sum(tensor.nbytes for tensor in tensors)

    def _check(self, problem: str | None) -> None:
        if problem is not None:
            raise _damaged(self._path, f"layer {self._name!r} has {problem}")


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


def _matrix(plain: Any, shape: torch.Size, take: Take) -> AttentionMatrix:
    matrix = matrix_of(plain, take)
    if matrix.shape != shape:
        raise ValueError(f"a matrix of shape {tuple(matrix.shape)}, not {tuple(shape)}")
    return matrix


def _value(plain: Any, shape: torch.Size, take: Take) -> Tensor:
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


def _tensor_problem(role: str, tensor: Tensor) -> str | None:
    if (wrong := wrong_numbers(role, tensor)) is not None:
        return f"{wrong} in its {role}"
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).amax()) > 1:
        return f"something neither true nor false in its {role}"
    return None


def _problem(content: Any, shape: torch.Size) -> str | None:
    if isinstance(content, Top) and content.indices.numel():
        first, last = (int(each) for each in content.indices.aminmax())
        if first < -1 or last >= shape[-1]:
            return f"a key {first if first < -1 else last} among its largest weights"
    source = content.source if isinstance(content, AttentionMatrix) else None
    if isinstance(source, GivenScores) and source.are_weights:
        try:
            check_weights(source.values)
        except ValueError as error:
            return _reason(error).partition(" has ")[2]
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


def _shortened(what: str) -> str:
    """Truncate and escape a text from the untrusted file."""
    return visible(what if len(what) <= _MOST_CHARACTERS else what[:_MOST_CHARACTERS] + " ...")


def _damaged(path: Path, what: str) -> RegardError:
    return RegardError(
        f"{path} is damaged: {_shortened(what)}.\n    Take a copy of it, or record and save again."
    )


def _no_recording(path: Path, what: str) -> RegardError:
    return RegardError(
        f"{path} is no recording of regard: {_shortened(what)}.\n"
        "    regard record and seen.save() write recordings. If it is a copy of one, copy it "
        "again: it may be cut short."
    )
