"""A reader of safetensors files that loads each tensor on demand and checks its checksum.

A safetensors file has the length of the header, the header in JSON, and the bytes of all tensors.
The file is read and never mapped into memory, because a process that reads a mapped file is killed
if the file is truncated.
"""

import json
import os
import struct
from collections.abc import Iterator
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

__all__ = ["DTYPES", "DamagedError", "TensorFile", "checksum", "packed_header", "written"]

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
_BUFFER = 2**18  # bytes that are copied before they are written


class DamagedError(ValueError):
    """The file has other bytes than were written."""


def checksum(content: memoryview | bytes) -> str:
    """Return the checksum of some bytes, BLAKE2b with 128 bits, in hexadecimal digits."""
    return blake2b(content, digest_size=_DIGEST).hexdigest()


def written(file: BinaryIO, content: memoryview) -> str:
    """Write some bytes, which may change meanwhile, and return the checksum of what was written."""
    digest = blake2b(digest_size=_DIGEST)
    for start in range(0, len(content), _BUFFER):
        part = bytes(content[start : start + _BUFFER])
        digest.update(part)
        file.write(part)
    return digest.hexdigest()


def packed_header(
    metadata: dict[str, str], checksums: dict[str, str], entries: dict[str, Any], size: int = 0
) -> bytes:
    """Return the bytes of a file before its first tensor, padded to ``size``, a multiple of 8.

    ``entries`` has the dtype, shape and data_offsets of each tensor.
    """
    texts = {_HEADER: _NO_DIGEST, **metadata, _TENSORS: json.dumps(checksums)}
    header = json.dumps({_METADATA: texts, **entries}).encode()
    header += b" " * max(-len(header) % 8, size - 8 - len(header))  # the tensors are aligned
    packed = struct.pack("<Q", len(header)) + header
    start = 8 + len(_BEFORE_DIGEST)
    return packed[:start] + checksum(packed).encode() + packed[start + 2 * _DIGEST :]


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A file with named tensors, open for reading.

    Attributes:
        metadata: the texts in the header.
        has_checksums: True if the header and each tensor have a checksum.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file, or is truncated.
        DamagedError: the header or a small tensor differs from its checksum.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        finalize(self, self._file.close)
        self._seeking = Lock()
        self._small: dict[str, Tensor] = {}
        size = os.fstat(self._file.fileno()).st_size
        length = struct.unpack("<Q", self._bytes(0, 8))[0] if size >= 8 else 0
        self._data = 8 + length
        if not 2 <= length <= size - 8:
            raise ValueError("it has no header, or is cut off")
        packed = self._bytes(0, self._data)
        if packed[8:].startswith(_BEFORE_DIGEST):  # first, because damaged JSON may not parse
            _check_header(packed)
        try:
            header = json.loads(packed[8:])
            self.metadata = _texts(header.pop(_METADATA, {}))
            self._entries = {name: _entry(each) for name, each in header.items()}
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError("its header is no header of tensors") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError("its header is not JSON") from error
        self.has_checksums = _HEADER in self.metadata
        if self.has_checksums:
            _check_header(packed)
        self._checksums = _texts(json.loads(self.metadata.get(_TENSORS, "{}")))
        _check_places(self._entries, size - self._data)
        for name, entry in self._entries.items():
            if entry.stop - entry.start <= _SMALL:
                self._small[name] = self._read(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            LookupError: there is no tensor of this name.
            DamagedError: the tensor differs from its checksum.
        """
        return self._small[name] if name in self._small else self._read(name)

    def stand_in(self, name: str) -> Tensor:
        """Return a small tensor, or zeros of a large one's shape and dtype that use no memory.

        Raises:
            LookupError: there is no tensor of this name.
        """
        entry = self._entries[name]
        zero = torch.zeros((), dtype=entry.dtype, device="cpu")
        return self._small.get(name, zero.expand(entry.shape))

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        content = torch.empty(entry.stop - entry.start, dtype=torch.uint8, device="cpu")
        digest = blake2b(digest_size=_DIGEST)
        for part, place in _parts(content, self._data + entry.start):
            self._fill(part, place)
            if self.has_checksums:
                digest.update(part)
        if self.has_checksums and digest.hexdigest() != self._checksums.get(name):
            raise DamagedError(f"the tensor {name!r} differs from its checksum")
        return content.view(entry.dtype).view(entry.shape)

    def _bytes(self, place: int, length: int) -> bytes:
        content = bytearray(length)
        self._fill(memoryview(content), place)
        return bytes(content)

    def _fill(self, part: memoryview, place: int) -> None:
        """Read bytes into a buffer; safe for concurrent threads and forked processes."""
        while part:
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [part], place)
            else:  # Windows has neither preadv nor fork
                with self._seeking:
                    self._file.seek(place)
                    count = self._file.readinto(part) or 0
            if not count:
                raise DamagedError("it became shorter after it was opened")
            part, place = part[count:], place + count


def _parts(content: Tensor, place: int) -> Iterator[tuple[memoryview, int]]:
    view = memoryview(cast(Any, content.numpy()))
    for start in range(0, len(view), _AT_ONCE):
        yield view[start : start + _AT_ONCE], place + start


def _texts(plain: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in plain.values()):
        raise TypeError("metadata that are no text")
    return cast(dict[str, str], plain)


def _entry(plain: Any) -> _Entry:
    shape, (start, stop) = plain["shape"], plain["data_offsets"]
    numbers = [*shape, start, stop]
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise TypeError("a shape or place that is no whole number")
    dtype = _DTYPES[plain["dtype"]]
    if prod(shape) * dtype.itemsize != stop - start:
        raise ValueError("a tensor has another number of bytes than its shape needs")
    return _Entry(dtype, tuple(shape), start, stop)


def _check_header(packed: bytes) -> None:
    start = 8 + len(_BEFORE_DIGEST)
    stop = start + 2 * _DIGEST
    blank = packed[:start] + _NO_DIGEST.encode() + packed[stop:]
    found = packed[start:stop]
    if packed[8:start] != _BEFORE_DIGEST or checksum(blank).encode() != found:
        raise DamagedError("its header differs from its checksum")


def _check_places(entries: dict[str, _Entry], size: int) -> None:
    """Raise an error for tensors that overlap, leave gaps, or do not end with the file."""
    places = sorted((entry.start, entry.stop) for entry in entries.values())
    edges = [(0, 0), *places, (size, size)]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise ValueError("its tensors do not fill it; it may be cut off")
