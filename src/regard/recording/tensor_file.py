"""A reader of safetensors files that loads each tensor on demand and checks its checksum.

A safetensors file has the length of the header, the header in JSON, and the bytes of all tensors.
The file is read and never mapped into memory, because a process that reads a mapped file is killed
if the file is truncated.
"""

import json
import os
import struct
import sys
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, cast
from weakref import finalize

import torch
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The safetensors names of the dtypes that a recording can have."""

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_METADATA, _HEADER, _TENSORS = "__metadata__", "checksum", "checksums"
_DIGEST = 16  # bytes
_NO_DIGEST = "0" * (2 * _DIGEST)
_BEFORE_DIGEST = json.dumps({_METADATA: {_HEADER: ""}}).encode().removesuffix(b'"}}')
_SMALL = 2**16  # bytes; tensors up to this size are read when the file is opened
_AT_ONCE = 2**24  # bytes


class DamagedError(ValueError):
    """The file has other bytes than were written."""


def checksum(content: memoryview | bytes) -> str:
    """Return the checksum of some bytes, BLAKE2b with 128 bits, in hexadecimal digits."""
    return blake2b(content, digest_size=_DIGEST).hexdigest()


def packed_header(
    metadata: dict[str, str], checksums: dict[str, str], entries: dict[str, Any]
) -> bytes:
    """Return the bytes of a file before its first tensor.

    ``entries`` has the dtype, shape and data_offsets of each tensor.
    """
    texts = {_HEADER: _NO_DIGEST, **metadata, _TENSORS: json.dumps(checksums)}
    header = json.dumps({_METADATA: texts, **entries}).encode()
    header += b" " * (-len(header) % 8)  # the tensors are aligned
    packed = struct.pack("<Q", len(header)) + header
    start = 8 + len(_BEFORE_DIGEST)
    return packed[:start] + checksum(packed).encode() + packed[start + 2 * _DIGEST :]


class Bytes:
    """A file that is read at any offset, by concurrent threads and by forked processes.

    It is closed when nothing refers to it any more.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._seeking = Lock()
        finalize(self, file.close)

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def at(self, start: int, length: int) -> bytes:
        """Read some bytes.

        Raises:
            DamagedError: the file is shorter than it was.
        """
        content = bytearray(length)
        self.fill(memoryview(content), start)
        return bytes(content)

    def fill(self, part: memoryview, start: int) -> None:
        """Read bytes into a buffer.

        Raises:
            DamagedError: the file is shorter than it was.
        """
        while part:
            if sys.platform != "win32" and hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [part], start)
            else:  # neither Windows nor an old macOS has it
                with self._seeking:
                    self._file.seek(start)
                    count = cast(Any, self._file).readinto(part) or 0
            if not count:
                raise DamagedError("it became shorter after it was opened")
            part, start = part[count:], start + count


@dataclass(frozen=True)
class Entry:
    """The dtype, the shape and the bytes of a tensor in a file, from ``start`` to ``stop``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def entry_of(plain: Any, start: int) -> Entry:
    """Convert the plain data of a tensor, which begins at ``start``, to an Entry.

    Raises:
        LookupError, TypeError: the plain data are invalid.
    """
    dtype, shape = _DTYPES[plain["dtype"]], tuple(plain["shape"])
    if not all(type(each) is int and each >= 0 for each in shape):
        raise TypeError("a shape that is no whole numbers")
    return Entry(dtype, shape, start, start + prod(shape) * dtype.itemsize)


def read_tensor(source: Bytes, name: object, entry: Entry, digest: str | None) -> Tensor:
    """Read a tensor, and compare it with its checksum unless that is None.

    Raises:
        DamagedError: the tensor differs from its checksum.
    """
    content = torch.empty(entry.stop - entry.start, dtype=torch.uint8, device="cpu")
    view, summed = memoryview(cast(Any, content.numpy())), blake2b(digest_size=_DIGEST)
    for start in range(0, len(view), _AT_ONCE):
        part = view[start : start + _AT_ONCE]
        source.fill(part, entry.start + start)
        if digest is not None:
            summed.update(part)
    if digest is not None and summed.hexdigest() != digest:
        raise DamagedError(f"the tensor {name!r} differs from its checksum")
    return content.view(entry.dtype).view(entry.shape)


def stand_in(entry: Entry) -> Tensor:
    """Return zeros of a tensor's shape and dtype that use no memory."""
    return torch.zeros((), dtype=entry.dtype, device="cpu").expand(entry.shape)


class TensorFile:
    """A file with named tensors, open for reading.

    Attributes:
        metadata: the texts in the header.
        has_checksums: True if the header has a checksum.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file, or is truncated.
        DamagedError: the header or a small tensor differs from its checksum.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = Bytes(path.open("rb", buffering=0))
        size = self._bytes.size
        length = struct.unpack("<Q", self._bytes.at(0, 8))[0] if size >= 8 else 0
        if not 2 <= length <= size - 8:
            raise ValueError("it has no header, or is cut off")
        packed = self._bytes.at(0, 8 + length)
        self.has_checksums = packed[8:].startswith(_BEFORE_DIGEST)
        if self.has_checksums:  # checked first, because damaged JSON may not parse
            _check_header(packed)
        try:
            header = json.loads(packed[8:])
            self.metadata = _texts(header.pop(_METADATA, {}))
            self._entries = {name: _with_offsets(each, 8 + length) for name, each in header.items()}
            self._checksums = _texts(json.loads(self.metadata.get(_TENSORS, "{}")))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError("its header is no header of tensors") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError("its header is not JSON") from error
        _check_offsets(self._entries, 8 + length, size)
        self._small: dict[str, Tensor] = {}
        if self.has_checksums:
            for name, entry in self._entries.items():
                if entry.stop - entry.start <= _SMALL:
                    self._small[name] = self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            LookupError: there is no tensor or checksum of this name.
            DamagedError: the tensor differs from its checksum.
        """
        if name in self._small:
            return self._small[name]
        return read_tensor(self._bytes, name, self._entries[name], self._checksums[name])

    def stand_in(self, name: str) -> Tensor:
        """Return a small tensor, or zeros of a large one's shape and dtype that use no memory.

        Raises:
            LookupError: there is no tensor of this name.
        """
        entry = self._entries[name]
        return self._small[name] if name in self._small else stand_in(entry)


def _with_offsets(plain: Any, data: int) -> Entry:
    start, stop = plain["data_offsets"]
    if type(start) is not int or start < 0:
        raise TypeError("an offset that is no whole number")
    entry = entry_of(plain, data + start)
    if entry.stop != data + stop:
        raise ValueError("a tensor has another number of bytes than its shape needs")
    return entry


def _texts(plain: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in plain.values()):
        raise TypeError("metadata that are no text")
    return cast(dict[str, str], plain)


def _check_header(packed: bytes) -> None:
    start = 8 + len(_BEFORE_DIGEST)
    stop = start + 2 * _DIGEST
    blank = packed[:start] + _NO_DIGEST.encode() + packed[stop:]
    if checksum(blank).encode() != packed[start:stop]:
        raise DamagedError("its header differs from its checksum")


def _check_offsets(entries: dict[str, Entry], start: int, stop: int) -> None:
    """Raise an error for tensors that overlap, leave gaps, or do not end with the file."""
    ranges = sorted((entry.start, entry.stop) for entry in entries.values())
    edges = [(start, start), *ranges, (stop, stop)]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise ValueError("its tensors do not fill it; it may be cut off")
