"""Changing what a recording's file says of itself."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    header["__metadata__"]["regard"] = json.dumps(about) if text is None else text
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])
    return path
