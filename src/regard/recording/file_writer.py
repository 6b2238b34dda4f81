"""An atomic writer of recordings.

A file begins with its header, which has the place and the checksum of each tensor. The header is
written last, into room that is left for it, so each checksum is that of the bytes in the file. All
is written to a partial file next to the target, which is then renamed to the target. An older file
with that name stays complete until then.
"""

import json
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from ctypes import c_char
from glob import escape
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE
from typing import TYPE_CHECKING, BinaryIO
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from regard.errors import RegardError, check_path, dtype_text
from regard.recording.file_format import (
    Plain,
    plain_answers,
    plain_matrix,
    wrong_numbers,
)
from regard.recording.layers import Layer
from regard.recording.tensor_file import DTYPES, checksum, packed_header, written
from regard.recording.version import version
from regard.text.tokens import Token, as_tokens

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where an open file cannot be removed
    fcntl = None

if TYPE_CHECKING:
    from regard.recording.recording import Recording

__all__ = ["FORMAT", "KEY", "Writer", "check_replaceable"]

FORMAT = 2
"""The version of the file format. Files of format 1 have no checksums."""

KEY = "regard"
"""The key of a recording's JSON in the metadata of a safetensors file."""

_OPEN: WeakValueDictionary[Path, "Writer"] = WeakValueDictionary()  # open writers by target

_ALIGNED = 8
_NO_CHECKSUM = checksum(b"")


class Writer:
    """A writer of one recording, which loads one layer at a time.

    ``write`` renames the partial file to the target. Until then, and after ``abandon``, an older
    recording with that name is unchanged. Only recordings are replaced, and no other files.

    Args:
        path: the file, in an existing folder.

    Raises:
        TypeError: path is not a path.
        ValueError: path is empty.
        RegardError: the file cannot be written, or another writer is writing it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path(path)
        # If the path is a link, its target is replaced and the link stays.
        self._target = Path(os.path.realpath(self.path))
        # 50 characters have at most 200 bytes, so the suffix fits into a file name of 255 bytes.
        beginning = self._target.name[:50]
        self._partial = self._target.with_name(f"{beginning}.{token_hex(4)}.partial")
        if self.path.is_dir():
            raise RegardError(
                f"{self.path} is a folder; a recording is one file.\n"
                f"    Save it in the folder, {self.path / 'run.safetensors'}."
            )
        if os.path.lexists(self._target) and not self._target.is_file():
            raise RegardError(
                f"{self.path} is a device, a pipe or the like; a recording replaces files alone.\n"
                "    Save it under a name of its own."
            )
        if self._target in _OPEN:
            raise RegardError(
                f"{self.path} is being written already; the later of two would replace the other.\n"
                "    Give each its own path, or end the block of the observe that writes it before."
            )
        check_replaceable(self.path)
        _remove_partials(self._target.parent, beginning)
        try:
            self._file = self._partial.open("xb")
            with suppress(OSError):  # some file systems have no locks
                _lock(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        _OPEN[self._target] = self

    def write(self, seen: "Recording", progress: Callable[[int, int], None] | None = None) -> None:
        """Write a recording, and rename the partial file to the target.

        If an error is raised, the partial file is removed.

        Raises:
            RegardError: a layer contains code or NaN, or the disk is full.
        """
        try:
            self._write(seen, progress)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self._target.exists():
                self._partial.chmod(S_IMODE(self._target.stat().st_mode))
            self._partial.replace(self._target)
            _sync_folder(self._target.parent)
            self._release()
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the partial file; the recording is not written."""
        self._release()
        with suppress(OSError):  # closing may fail to flush
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _release(self) -> None:
        if _OPEN.get(self._target) is self:
            del _OPEN[self._target]

    def _write(self, seen: "Recording", progress: Callable[[int, int], None] | None) -> None:
        about = {
            "format": FORMAT,
            "regard": version(),
            "torch": torch.__version__,
            "model": seen.model,
            "query_tokens": _plain_tokens("query_tokens", seen.query_tokens),
            "key_tokens": _plain_tokens("key_tokens", seen.key_tokens),
            "refused": seen.refused,
            **({} if seen.shard is None else {"shard": seen.shard._asdict()}),
        }
        room = _Tensors()
        layers = [_plain_layer(layer, room.put) for layer in seen.layers]
        size = len(_header(about, layers, room)) + room.slack
        self._file.seek(size)
        content, layers = _Tensors(self._file), list[Plain]()
        for layer in seen.layers:
            layers.append(_plain_layer(layer, content.put))
            if progress is not None:
                progress(len(layers), len(seen.layers))
        self._file.truncate()
        header = _header(about, layers, content, size)
        if len(header) > size:
            raise RegardError(
                f"{self.path} cannot be written: the recording changed while it was saved.\n"
                "    Save it again when the model has stopped."
            )
        self._file.seek(0)
        self._file.write(header)

    def _failed(self, error: OSError) -> RegardError:
        return RegardError(
            f"{self.path} cannot be written: {error.strerror}; nothing of it is left, "
            "and a file that was there is as it was.\n"
            "    Save it where there is room and you may write."
        )


class _Tensors:
    """The tensors of a file, one after the other.

    They are written to the end of the file. Without a file, they are counted as if no two of them
    were equal, to find the room that the header needs at most.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self.checksums: dict[str, str] = {}
        self.entries: dict[str, Plain] = {}
        self._file = file
        self._end = 0
        self._names: dict[Hashable, str] = {}

    @property
    def slack(self) -> int:
        """The bytes that the names of equal tensors may need more; the data stay aligned."""
        names = [len(json.dumps(json.dumps(name))) for name in self.entries]
        return _ALIGNED * (len(names) * max(names, default=0) // _ALIGNED)

    def put(self, name: str, tensor: Tensor) -> str:
        """Add a tensor, and return its name, which is that of an equal tensor before it."""
        filler = -tensor.nbytes % _ALIGNED
        if self._file is None:
            self._place(name, tensor, filler, _NO_CHECKSUM)
            return name
        _check_numbers(name.rpartition("/")[2], tensor)
        here = tensor.detach().cpu().contiguous()
        start = self._file.tell()
        digest = written(self._file, _bytes(here))
        known = here.dtype, here.shape, digest
        if known in self._names:
            self._file.seek(start)
        else:
            self._names[known] = name
            self._file.write(bytes(filler))
            self._place(name, tensor, filler, digest)
        return self._names[known]

    def _place(self, name: str, tensor: Tensor, filler: int, digest: str) -> None:
        self._add(name, DTYPES[tensor.dtype], tensor.shape, tensor.nbytes, digest)
        if filler:  # safetensors allows no gaps, so a tensor fills them
            zeros = checksum(bytes(filler))
            self._add(f"filler.{len(self.entries)}", "U8", (filler,), filler, zeros)

    def _add(self, name: str, dtype: str, shape: Sequence[int], size: int, digest: str) -> None:
        start, self._end = self._end, self._end + size
        self.checksums[name] = digest
        offsets = [start, self._end]
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}


def _check_numbers(role: str, tensor: Tensor) -> None:
    if (wrong := wrong_numbers(role, tensor)) is not None:
        raise RegardError(
            f"it has {wrong} in its {role}; a recording in a file holds numbers.\n"
            "    Look at the recording as it is: the first layer with NaN says where it began."
        )


def _header(about: Plain, layers: Sequence[Plain], tensors: _Tensors, size: int = 0) -> bytes:
    metadata = {KEY: json.dumps({**about, "layers": layers})}
    return packed_header(metadata, tensors.checksums, tensors.entries, size)


def check_replaceable(path: Path) -> None:
    """Raise an error if a file exists that is neither empty nor a recording.

    Raises:
        RegardError: there is such a file.
    """
    beginning = b""
    if path.is_file():
        with path.open("rb") as file:
            beginning = file.read(200)
    is_recording = beginning[8:].startswith(b'{"__metadata__"') and f'"{KEY}"'.encode() in beginning
    if beginning and not is_recording:
        raise RegardError(
            f"{path} exists and is not a recording; saving would lose it.\n"
            "    Save under another name, or remove that file first."
        )


def _plain_layer(layer: Layer, keep: Callable[[str, Tensor], str]) -> Plain:
    """Convert a layer to plain data, in which each tensor has the name that ``keep`` gives it."""
    names: dict[str, str] = {}

    def put(role: str, tensor: Tensor) -> str:
        if tensor.dtype not in DTYPES:
            raise RegardError(
                f"its {role} is {dtype_text(tensor.dtype)}; a recording in a file has no such "
                "numbers.\n    Use A.to(torch.float32), and int64 for whole numbers."
            )
        name = f"{layer.name}/{role}"
        names[name] = keep(name, tensor)
        return name

    try:
        return {
            "name": layer.name,
            "shape": list(layer.shape),
            "origin": layer.origin,
            "queries": layer.queries,
            "matrix": None if layer.matrix is None else plain_matrix(layer.whole(), put),
            "answers": plain_answers(layer.answers, put),
            "value": None if layer.value is None else put("value", layer.whole_value()),
            "tensors": names,
        }
    except RegardError as error:
        raise RegardError(f"layer {layer.name!r} cannot be saved: {error}") from error


def _remove_partials(folder: Path, beginning: str) -> None:
    """Remove partial files of this target that killed processes left behind."""
    for path in folder.glob(f"{escape(beginning)}.????????.partial"):
        with suppress(OSError), path.open("rb") as file:  # an active writer has locked its file
            _lock(file.fileno())
            path.unlink()


def _lock(handle: int) -> None:
    """Lock an open file until it is closed.

    Raises:
        OSError: another process has locked it.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to the disk, on systems that support it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _plain_tokens(name: str, given: Iterable[Token | str] | None) -> Plain | None:
    tokens = as_tokens(name, given)
    if tokens is None:
        return None
    special = [place for place, token in enumerate(tokens) if token.special]
    return {"text": [token.text for token in tokens], "special": special}


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; the tensor must outlive them."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
