"""Changing what a recording's file says of itself."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.recording.tensor_file import checksum, packed_header

Change = Callable[[dict[str, Any]], object]


def nothing(about: dict[str, Any]) -> None:
    """Changes nothing."""


def changed(path: Path, change: Change = nothing, text: str | None = None) -> Path:
    """The file with its JSON changed, or with this text for it; all lengths are right again."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["regard"])
    change(about)
    texts = header.pop("__metadata__")
    checksums = json.loads(texts.pop("checksums"))
    texts = {"regard": json.dumps(about) if text is None else text}
    path.write_bytes(packed_header(texts, checksums, header) + data[8 + length :])
    return path


def tensor_changed(path: Path, name: str, place: int, content: bytes) -> Path:
    """Return the file with some bytes of a tensor changed, and with its new checksum."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    texts = header.pop("__metadata__")
    checksums = json.loads(texts["checksums"])
    start, stop = (8 + length + offset for offset in header[name]["data_offsets"])
    data[start + place : start + place + len(content)] = content
    checksums[name] = checksum(bytes(data[start:stop]))
    packed = packed_header({"regard": texts["regard"]}, checksums, header)
    path.write_bytes(packed + bytes(data[8 + length :]))
    return path
