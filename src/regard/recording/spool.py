"""A spool: an append-only file of tensors and notes that a crash leaves readable.

A record of a spool is the length of a JSON text, the text, its checksum, and for a tensor its bytes
and their checksum. A process that is killed leaves a file whose last record may be cut off. All
records before it are whole.
"""

import json
import os
import struct
import sys
from contextlib import suppress
from ctypes import c_char
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from torch import Tensor

from regard.recording.tensor_file import (
    DTYPES,
    Bytes,
    Entry,
    checksum,
    entry_of,
    read_tensor,
    stand_in,
)

if sys.platform != "win32":  # where an open file cannot be removed
    import fcntl

MAGIC = b"regard spool 1\n\0"
"""The first bytes of a spool."""

_DIGEST = 32  # hexadecimal digits
_BUFFER = 2**18  # bytes that are copied before they are written
_SHARED = 2**16  # bytes; equal tensors of at least this size are written once


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor in a spool, which a call reads; ``number`` counts the tensors before it."""

    number: int
    entry: Entry
    digest: str
    source: Bytes

    def __call__(self) -> Tensor:
        return read_tensor(self.source, self.number, self.entry, None)


class Spool:
    """A spool that is written.

    A tensor from any device is copied to the file. Equal large tensors are written once.

    Args:
        path: the file, which replaces an older spool; None for a temporary file without a name.
        folder: the folder of a temporary file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None, folder: Path | None = None) -> None:
        self.path = path
        if path is None:
            file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  remove() closes it
            self._file = cast(BinaryIO, file)
        else:
            path.unlink(missing_ok=True)  # those who read it keep what they have opened
            self._file = cast(BinaryIO, path.open("x+b", buffering=0))
            lock(self._file)
        self._bytes = Bytes(self._file)
        self._tensors = 0
        self._written: dict[tuple[object, ...], Piece] = {}
        self._end = 0
        self._write(MAGIC)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def append(self, tensor: Tensor, *, once: bool = False) -> Piece:
        """Append a tensor; with ``once``, use an equal tensor that is there already.

        Raises:
            OSError: the disk is full. The spool ends with the record before.
            KeyError: a file has no numbers of this dtype.
        """
        tensor = tensor.detach().cpu().contiguous()
        about = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        before = self._end
        try:
            start = self._head(about)
            digest = self._payload(_bytes(tensor))
        except BaseException:
            self._cut(before)
            raise
        key = tensor.dtype, tensor.shape, digest
        if once and key in self._written:
            self._cut(before)
            return self._written[key]
        entry = Entry(tensor.dtype, tuple(tensor.shape), start, start + tensor.nbytes)
        piece = Piece(self._tensors, entry, digest, self._bytes)
        self._tensors += 1
        if once or tensor.nbytes >= _SHARED:
            self._written[key] = piece
        return piece

    def note(self, plain: dict[str, Any]) -> None:
        """Append plain data.

        Raises:
            OSError: the disk is full. The spool ends with the record before.
        """
        before = self._end
        try:
            self._head(plain)
        except BaseException:
            self._cut(before)
            raise

    def copy(self, piece: Piece, target: BinaryIO) -> None:
        """Write the bytes of a tensor to another file."""
        for start in range(piece.entry.start, piece.entry.stop, _BUFFER):
            length = min(_BUFFER, piece.entry.stop - start)
            target.write(self._bytes.at(start, length))

    def end(self) -> None:
        """Let another process or block replace the file; it stays readable."""
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def remove(self) -> None:
        """Close and remove the file."""
        self._file.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _head(self, plain: dict[str, Any]) -> int:
        text = json.dumps(plain).encode()
        self._write(struct.pack("<Q", len(text)) + text + checksum(text).encode())
        return self._end

    def _payload(self, content: memoryview) -> str:
        """Write bytes, which may change meanwhile, and the checksum of what was written."""
        digest = blake2b(digest_size=_DIGEST // 2)
        for start in range(0, len(content), _BUFFER):
            part = bytes(content[start : start + _BUFFER])
            digest.update(part)
            self._write(part)
        self._write(digest.hexdigest().encode())
        return digest.hexdigest()

    def _write(self, content: bytes) -> None:
        part = memoryview(content)
        self._file.seek(self._end)
        while part:
            count = self._file.write(part)
            part, self._end = part[count:], self._end + count

    def _cut(self, end: int) -> None:
        self._end = end
        with suppress(OSError):
            self._file.truncate(end)


class SpoolFile:
    """A spool that is read, up to its first record that is not whole.

    Attributes:
        notes: the plain data, in their order.

    Raises:
        OSError: the file cannot be read.
        LookupError, TypeError, ValueError: it is not a spool.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = Bytes(path.open("rb", buffering=0))
        self.notes: list[Any] = []
        self._entries: list[tuple[Entry, str]] = []
        at, size = len(MAGIC), self._bytes.size
        while (text := self._text(at, size)) is not None:
            at += 8 + len(text) + _DIGEST
            plain = json.loads(text)
            if "dtype" not in plain:
                self.notes.append(plain)
                continue
            entry = entry_of(plain, at)
            at = entry.stop + _DIGEST
            if at > size:
                break
            self._entries.append((entry, self._bytes.at(entry.stop, _DIGEST).decode("latin-1")))

    def _text(self, at: int, size: int) -> bytes | None:
        """Return the JSON text of the record at an offset; None if the text is not whole."""
        if at + 8 + _DIGEST > size:
            return None
        (length,) = struct.unpack("<Q", self._bytes.at(at, 8))
        if at + 8 + length + _DIGEST > size:
            return None
        text = self._bytes.at(at + 8, length)
        digest = self._bytes.at(at + 8 + length, _DIGEST)
        return text if checksum(text).encode() == digest else None

    def tensor(self, number: int) -> Tensor:
        """Read a tensor by its number.

        Raises:
            LookupError: there is no tensor of this number.
            DamagedError: the tensor differs from its checksum.
        """
        entry, digest = self._entries[_index(number)]
        return read_tensor(self._bytes, number, entry, digest)

    def stand_in(self, number: int) -> Tensor:
        """Return zeros of a tensor's shape and dtype that use no memory.

        Raises:
            LookupError: there is no tensor of this number.
        """
        return stand_in(self._entries[_index(number)][0])


def _index(number: object) -> int:
    if type(number) is not int or number < 0:
        raise KeyError(number)
    return number


def spool_of(path: Path) -> Path:
    """Return the path of the spool that is written beside a recording, or its link's target."""
    target = Path(os.path.realpath(path))
    return target.with_name(f"{target.name}.part")


def lock(file: BinaryIO) -> None:
    """Lock an open file until it is closed, on systems that have locks.

    Raises:
        BlockingIOError: another process or block has locked it.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # some file systems have no locks
            pass


def is_locked(path: Path) -> bool:
    """Return True if a process writes a file."""
    try:
        with path.open("rb") as file:
            lock(file)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; the tensor must outlive them."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
