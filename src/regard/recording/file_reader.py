"""A reader of recordings that opens a file fast and reads the tensors of each layer on demand.

The file is untrusted. No code from it runs, all its contents are checked, and sizes that it only
claims allocate no memory.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.errors import RegardError, bytes_text, check_path, check_weights
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_format import (
    FORMAT,
    ORIGIN,
    REFUSAL,
    ReadTensor,
    answer_of,
    check_rows,
    count_of,
    grids_of,
    heading_of,
    layer_of,
    matrix_of,
    pictures_of,
    reduction_of,
    shape_of,
    wrong_numbers,
)
from regard.recording.file_writer import KEY
from regard.recording.layers import Answers, Layer, Lazy, Refusal
from regard.recording.merged_calls import (
    SPILLED,
    CallAnswers,
    Calls,
    Extent,
    SpooledColumns,
)
from regard.recording.recording import Recording, merged
from regard.recording.spool import MAGIC, SpoolFile, spool_of
from regard.recording.tensor_file import DamagedError, TensorFile
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top
from regard.scores.given_scores import GivenScores
from regard.text.escaping import visible

Content = TypeVar("Content")

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
_SAVE = "a recording is made with seen.save()."


def load(path: str | os.PathLike[str]) -> Recording:
    """Load a recording that ``Recording.save`` or ``regard.observe`` with ``path=`` wrote.

    Opening is fast for files of any size. The tensors of a layer are read at its first use and
    compared with their checksums. No code from the file runs.

    A folder holds the parts of a distributed run, one file for each process. They are merged as by
    ``Recording.merge``.

    ``run.safetensors.part`` is what ``observe(path="run.safetensors")`` has written so far, or had
    written when its process ended. It is loaded up to the last call that was finished.

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
    _check_file(path)
    with path.open("rb") as file:
        is_spool = file.read(len(MAGIC)) == MAGIC
    return _recovered(path) if is_spool else _recording(path, *_opened(path))


def _empty(path: Path, about: dict[str, Any]) -> Recording:
    """Return a recording without layers, from its plain data."""
    if about["format"] != FORMAT or type(about["format"]) is not int:
        raise RegardError(
            f"{path} is a recording of format {_shortened(repr(about['format']))}; "
            f"this version of regard reads format {FORMAT}.\n"
            f"    Open it with the regard that made it, {_shortened(repr(about.get('regard')))}."
        )
    heading = heading_of(about)
    tokens = {name: heading[name] for name in ("query_tokens", "key_tokens")}
    seen = Recording({}, model=heading["model"], **tokens)
    seen.refused, seen.trials = list(heading["refused"]), list(heading["trials"])
    seen.shard = heading["shard"]
    return seen


def _recording(path: Path, file: TensorFile, about: dict[str, Any]) -> Recording:
    try:
        seen, contents = _empty(path, about), _Contents(path)
        for plain in about["layers"]:
            seen.put(_StoredLayer(file, contents, plain).layer)
        if len(seen.layers) < len(about["layers"]):
            raise ValueError("two layers have one name")
        # Pictures are small, and read at once.
        seen.put_pictures(pictures_of(about, file.tensor), grids_of(about))
        return seen
    except RegardError:
        raise
    except _WRONG as error:
        raise _damaged(path, _reason(error)) from error


def _recovered(path: Path) -> Recording:
    """Return the recording in a spool, up to its last call that was finished."""
    try:
        file = SpoolFile(path)
        if not file.notes:
            raise ValueError("no layer in it was finished")
        first, *notes = file.notes
        seen, contents, queries = _empty(path, first), _Contents(path), _slice(first["queries"])
        runs: dict[object, _StoredCalls] = {}
        for note in notes:
            if note["kind"] == "refused":
                seen.refused.append(REFUSAL.read(note["refused"], None))
                runs = {run: calls for run, calls in runs.items() if calls.module != note["module"]}
            else:
                run = note["run"]
                if run not in runs:
                    runs[run] = _StoredCalls(file, contents, note["module"])
                runs[run].add(note)
        for calls in runs.values():
            if calls.spills:
                seen.refused.append(Refusal(calls.module, None, SPILLED))
            elif (layer := calls.layer(queries)) is not None:
                seen.append(layer)
        return seen
    except RegardError:
        raise
    except _WRONG as error:
        raise _damaged(path, _reason(error)) from error


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
    read_layers = read(path).layers
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
    return f"{layers}, {size}: every number has its checksum"


def _check_file(path: Path) -> None:
    if not path.exists():
        part = spool_of(path)
        remedy = f"{part} has what was finished." if part.exists() else _SAVE
        raise FileNotFoundError(f"there is no file {path}; {remedy}")
    if not path.is_file():
        raise _no_recording(path, "it is a folder" if path.is_dir() else "it is no file")


def _opened(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """Open a file, and return its tensors and the JSON of its recording."""
    try:
        file = TensorFile(path)
        about: Any = json.loads(file.metadata.get(KEY, "null"))
    except DamagedError as error:
        raise _damaged(path, _reason(error)) from error
    except _WRONG as error:
        raise _no_recording(path, _reason(error)) from error
    if not isinstance(about, dict) or "format" not in about:
        raise _no_recording(path, "it is a safetensors file of something else")
    if not file.has_checksums:
        raise _damaged(path, "its checksums are missing")
    return file, cast(dict[str, Any], about)


class _Contents:
    """The matrices, values and answers of a file; those used last are kept, limited in bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._lock = RLock()

    def get(self, layer: str, name: object, kv_len: int, build: Callable[[], Content]) -> Content:
        """Return an object of a layer, which ``build`` reads from the file if it is not kept.

        Raises:
            RegardError: the file is damaged.
        """
        with self._lock:
            if (layer, name) not in self._kept:
                self._kept[layer, name] = self._checked(layer, kv_len, build)
            self._kept.move_to_end((layer, name))
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return self._kept[layer, name][0]

    def _checked(
        self, layer: str, kv_len: int, build: Callable[[], Content]
    ) -> tuple[Content, int]:
        """Return an object and its size in bytes."""
        try:
            content = build()
            if (problem := _problem(content, kv_len)) is not None:
                raise ValueError(f"it has {problem}")
        except _WRONG as error:
            what = f": {_reason(error)}".replace(": it has ", " has ")
            raise _damaged(self._path, f"layer {layer!r}{what}") from error
        tensors = cast(Any, content)
        if isinstance(content, AttentionMatrix):
            mask = content.mask
            tensors = (*content.source.tensors, *(() if mask is None else mask.tensors))
        return content, sum(
            each.nbytes for each in ([tensors] if isinstance(tensors, Tensor) else tensors)
        )


class _StoredLayer:
    """A layer in a file.

    Its plain data are checked immediately, with zeros in place of large tensors.
    """

    def __init__(self, file: TensorFile, contents: _Contents, plain: Any) -> None:
        self._file, self._contents = file, contents
        self._name = name = plain["name"]
        try:
            read = layer_of(plain)
            self._shape = read["shape"]
            answers = [
                (reduction_of(each), self._stored(number, answer_of, each))
                for number, each in enumerate(plain["answers"])
            ]
            self.layer = Layer(
                **read,
                matrix=self._stored("matrix", _matrix, plain["matrix"]),
                answers=Answers.reading((asked, each) for asked, each in answers if each),
                value=self._stored("value", _value, plain["value"]),
            )
        except _WRONG as error:
            raise ValueError(f"layer {name!r}: {_reason(error)}") from error

    def _stored(
        self, name: object, build: Callable[[Any, torch.Size, ReadTensor], Content], plain: Any
    ) -> Lazy[Content] | None:
        """Return a function that reads the object of plain data; None if the data are None."""
        if plain is None:
            return None
        shape, claimed = self._shape, build(plain, self._shape, self._file.stand_in)

        def read_tensor(name: Any) -> Tensor:
            return _checked_tensor(name.rpartition("/")[2], self._file.tensor(name))

        def read() -> Content:
            make = partial(build, plain, shape, read_tensor)
            return self._contents.get(self._name, name, shape[-1], make)

        return Lazy(read, claimed)


class _StoredCalls:
    """The calls of one attention in a spool, merged when they are first read."""

    def __init__(self, file: SpoolFile, contents: _Contents, module: Any) -> None:
        if not isinstance(module, str):
            raise TypeError(f"a layer of the name {module!r}")
        self.module = module
        self._file, self._contents = file, contents
        self._keys, self._value = SpooledColumns(), SpooledColumns()
        self._calls = Calls(self._keys.read, lambda tensor: tensor, torch.device("cpu"))
        self._notes = list[Any]()  # of each call
        self._has_value = True
        self._masks: dict[int, Tensor] = {}

    @property
    def spills(self) -> bool:
        """True if rows attend to slots of a cache that no call has filled."""
        return bool(self._notes and self._notes[-1]["spills"])

    def add(self, note: Any) -> None:
        """Add the plain data of a call."""
        try:
            if note["kind"] == "call":
                self._add_call(note)
            self._notes.append(note)
        except _WRONG as error:
            raise ValueError(f"layer {self.module!r}: {_reason(error)}") from error

    def _add_call(self, note: Any) -> None:
        if note["keys"] is not None:
            self._append(self._keys, "key", note["keys"])
        if note["value"]:
            self._append(self._value, "value", note["value"])
        self._has_value &= note["value"] is not None
        if note["matrix"] is None:
            return  # none of its queries is selected
        scores, base = note["matrix"]["scores"], count_of(note["base"])
        kv_len = count_of(note["columns"])
        if not 0 < base + kv_len <= self._keys.length:
            raise ValueError(f"keys {base} to {base + kv_len} of {self._keys.length}")

        def read_tensor(number: Any) -> Tensor:
            if number == "key":
                some = self._key
                return some[..., :1, :].expand(*some.shape[:-2], kv_len, some.shape[-1])
            return self._file.stand_in(number) if number == query else self._tensor(number, "mask")

        query = scores["values" if scores["kind"] == "GivenScores" else "query"]
        matrix = matrix_of(note["matrix"], read_tensor)
        self._calls.add(matrix, count_of(note["first"]), base, lambda: self._tensor(query, "query"))

    def _append(self, columns: SpooledColumns, role: str, plain: Any) -> None:
        at, number = plain
        tensor = self._file.stand_in(number)
        if tensor.ndim < 2 or not tensor.numel() or not 0 <= count_of(at) <= columns.length:
            raise ValueError(f"a {role} of shape {tuple(tensor.shape)} at {at}")
        if role == "key":
            self._key = tensor
        columns.add(at, tensor.shape[-2], lambda: self._tensor(number, role))

    def _tensor(self, number: Any, role: str) -> Tensor:
        if number in self._masks:
            return self._masks[number]
        tensor = _checked_tensor(role, self._file.tensor(number))
        if role == "mask":  # layers and calls share them
            self._masks[number] = tensor
        return tensor

    def layer(self, queries: slice) -> Layer | None:
        """Return the layer; None if none of its queries is selected."""
        if not self._notes:
            return None
        notes = _up_to_totals(self._notes)
        last = notes[-1]
        extent = Extent(*(count_of(last[key]) for key in ("kv_len", "start", "ran")))
        if last["kind"] == "answers":
            answers, leading = self._answers(notes, queries)
            layer = answers.layer(self.module, extent, leading)
        elif extent.kv_len <= self._keys.length:
            layer = self._calls.layer(self.module, extent, range(extent.ran)[queries])
        else:
            layer = None
        if layer is None:
            return None
        layer = replace(layer, origin=ORIGIN.read(last["origin"], None))
        check_rows(layer.shape, layer.origin, layer.queries)
        return layer if layer.matrix is None else self._with_tensors(layer)

    def _with_tensors(self, layer: Layer) -> Layer:
        """Return a layer with a matrix and a value that are read on demand."""
        kv_len, value = layer.shape[-1], None
        if self._has_value and self._value.length >= kv_len:
            value = self._lazy("value", kv_len, lambda: self._value.read(0, kv_len))
        return replace(layer, matrix=self._lazy("matrix", kv_len, layer.whole), value=value)

    def _lazy(self, name: str, kv_len: int, build: Callable[[], Content]) -> Lazy[Content]:
        return Lazy(lambda: self._contents.get(self.module, (self, name), kv_len, build))

    def _answers(self, notes: list[Any], queries: slice) -> tuple[CallAnswers, torch.Size]:
        """Return the answers of the calls, and the shape of a matrix without rows and columns."""
        reductions = [reduction_of(plain) for plain in notes[0]["answers"]]
        totals = [index for index, each in enumerate(reductions) if each == Sum(-2)]
        answers, leading = CallAnswers(reductions, queries), shape_of(notes[0]["shape"])[:-2]
        for note in notes:
            shape = shape_of(note["shape"])
            first, base = count_of(note["first"]), count_of(note["base"])
            given = [
                None if at in totals else answer_of(plain, shape, self._answer)
                for at, plain in enumerate(note["answers"])
            ]
            answers.add(given, range(first, first + shape[-2]), base)
            if note["kv_len"] > base + shape[-1]:  # a total is padded to all keys
                raise ValueError(f"answers about {note['kv_len']} keys of {base + shape[-1]}")
        for at in totals:
            total = self._answer(notes[-1]["answers"][at]["answer"]["tensor"])
            if total.shape[:-1] != leading or not total.is_floating_point():
                raise ValueError(f"an answer of shape {tuple(total.shape)}")
            answers.put_total(at, total)
        return answers, leading

    def _answer(self, number: Any) -> Tensor:
        return self._tensor(number, "answers")


def _up_to_totals(notes: list[Any]) -> list[Any]:
    """Return the calls up to the last that has all answers: totals are not written at each call."""
    while len(notes) > 1 and any(each["answer"] is None for each in notes[-1].get("answers", ())):
        notes = notes[:-1]
    return notes


def _matrix(plain: Any, shape: torch.Size, read_tensor: ReadTensor) -> AttentionMatrix:
    matrix = matrix_of(plain, read_tensor)
    if matrix.shape != shape:
        raise ValueError(f"a matrix of shape {tuple(matrix.shape)}, not {tuple(shape)}")
    return matrix


def _value(plain: Any, shape: torch.Size, read_tensor: ReadTensor) -> Tensor:
    value = read_tensor(plain)
    fits = value.ndim == len(shape) and value.is_floating_point() and value.numel() > 0
    if not fits or (value.shape[:-3], value.shape[-2]) != (shape[:-3], shape[-1]):
        raise ValueError(f"a value of shape {tuple(value.shape)} for one of {tuple(shape)}")
    if len(shape) > 2 and shape[-3] % value.shape[-3]:
        raise ValueError(f"a value of {value.shape[-3]} heads for {shape[-3]}")
    return value


def _slice(plain: Any) -> slice:
    start, stop = plain
    if not all(end is None or (type(end) is int and abs(end) < _LONGEST) for end in (start, stop)):
        raise TypeError(f"queries of {plain!r:.60}")
    return slice(start, stop)


def _checked_tensor(role: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a file unchanged; raise a ValueError if a recording may not have it."""
    wrong = wrong_numbers(role, tensor)
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).amax()) > 1:
        wrong = "something neither true nor false"
    if wrong is not None:
        raise ValueError(f"it has {wrong} in its {role}")
    return tensor


def _problem(content: Any, kv_len: int) -> str | None:
    if isinstance(content, Top) and content.indices.numel():
        first, last = (int(each) for each in content.indices.aminmax())
        if first < -1 or last >= kv_len:
            return f"a key {first if first < -1 else last} among its largest weights"
    source = content.source if isinstance(content, AttentionMatrix) else None
    if isinstance(source, GivenScores) and source.are_weights:
        try:
            check_weights(source.values)
        except ValueError as error:
            return _reason(error).partition(" has ")[2]
    return None


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
