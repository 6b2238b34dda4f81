"""An atomic writer of recordings.

The tensors are first appended to a spool, which gives their checksums and finds equal ones. The
header and the tensors are then written to a partial file next to the target, which is renamed to
the target. An older file with that name stays complete until then.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.errors import RegardError, check_path, dtype_text
from regard.recording.file_format import (
    Plain,
    about,
    plain_layer,
    plain_pictures,
    wrong_numbers,
)
from regard.recording.spool import MAGIC, Piece, Spool, is_locked, lock, spool_of
from regard.recording.tensor_file import DTYPES, packed_header

if TYPE_CHECKING:
    from regard.recording.recording import Recording

KEY = "regard"
"""The key of a recording's JSON in the metadata of a safetensors file."""


def check_target(path: str | os.PathLike[str]) -> Path:
    """Check that a recording can be written to a path, and return the path.

    Raises:
        TypeError: path is not a path.
        ValueError: path is empty.
        RegardError: the path is a folder, a device or another file, or is being written.
    """
    path = check_path(path)
    if path.is_dir():
        raise RegardError(
            f"{path} is a folder; a recording is one file.\n"
            f"    Save it in the folder, {path / 'run.safetensors'}."
        )
    if os.path.lexists(target := _target(path)) and not target.is_file():
        raise RegardError(
            f"{path} is a device, a pipe or the like; a recording replaces files alone.\n"
            "    Save it under a name of its own."
        )
    if is_locked(spool_of(path)):
        raise RegardError(
            f"{path} is being written already; the later of two would replace the other.\n"
            "    Give each its own path, or end the block of the observe that writes it before."
        )
    check_replaceable(path)
    return path


def _target(path: Path) -> Path:
    """Return the file that is replaced: if the path is a link, its target, and the link stays."""
    return Path(os.path.realpath(path))


def write(
    path: Path,
    seen: "Recording",
    spool: Spool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a recording, one layer at a time.

    Args:
        path: the file, from ``check_target``.
        seen: the recording.
        spool: the spool that has tensors of the recording already; None for a temporary one.
        progress: called with the number of written layers and the number of layers.

    Raises:
        RegardError: a layer contains code or NaN, or the disk is full. An older file is unchanged.
    """
    target = _target(path)
    try:
        if spool is not None:
            return _write(target, seen, spool, progress)
        with Spool(None, target.parent) as temporary:
            _write(target, seen, temporary, progress)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RegardError:
    """Return the error for a file that cannot be written."""
    return RegardError(
        f"{path} cannot be written: {error.strerror}; nothing of it is left, "
        "and a file that was there is as it was.\n"
        "    Save it where there is room and you may write."
    )


def _write(
    target: Path,
    seen: "Recording",
    spool: Spool,
    progress: Callable[[int, int], None] | None,
) -> None:
    pieces, names = dict[str, Piece](), dict[int, str]()

    def keep(owner: str, role: str, tensor: Tensor) -> str:
        check_numbers(role, tensor)
        piece = spool.append(tensor, once=True)
        # The name of an equal tensor before it.
        first = names.setdefault(piece.number, f"{owner}/{role}")
        pieces[first] = piece
        return first

    layers = list[Plain]()
    for layer in seen.layers:
        try:
            layers.append(plain_layer(layer, partial(keep, layer.name)))
        except RegardError as error:
            raise RegardError(f"layer {layer.name!r} cannot be saved: {error}") from error
        if progress is not None:
            progress(len(layers), len(seen.layers))
    pictures = plain_pictures(seen.pictures, seen.layers, partial(keep, "pictures"))
    # In this order all tensors are aligned. safetensors itself writes them so.
    pieces = dict(sorted(pieces.items(), key=lambda item: -item[1].entry.dtype.itemsize))
    header = _header({**about(seen), **pictures, "layers": layers}, pieces)
    # 50 characters have at most 200 bytes, so the suffix fits into a file name of 255 bytes.
    beginning = target.name[:50]
    _remove_partials(target.parent, beginning)
    unfinished = target.with_name(f"{beginning}.{token_hex(4)}.partial")
    try:
        with unfinished.open("xb") as file:
            lock(file)
            file.write(header)
            for piece in pieces.values():
                spool.copy(piece, file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            unfinished.chmod(S_IMODE(target.stat().st_mode))
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _header(plain: Plain, pieces: dict[str, Piece]) -> bytes:
    entries, end = dict[str, Any](), 0
    for name, piece in pieces.items():
        start, end = end, end + piece.entry.stop - piece.entry.start
        dtype, shape = DTYPES[piece.entry.dtype], list(piece.entry.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    checksums = {name: piece.digest for name, piece in pieces.items()}
    return packed_header({KEY: json.dumps(plain)}, checksums, entries)


def check_numbers(role: str, tensor: Tensor) -> None:
    """Raise an error if a recording in a file may not contain the numbers of a tensor.

    Raises:
        RegardError: the tensor has NaN or an unusual dtype, or is a query or key with an infinity.
    """
    if tensor.dtype not in DTYPES:
        raise RegardError(
            f"its {role} is {dtype_text(tensor.dtype)}; a recording in a file has no such "
            "numbers.\n    Use A.to(torch.float32), and int64 for whole numbers."
        )
    if (wrong := wrong_numbers(role, tensor)) is not None:
        raise RegardError(
            f"it has {wrong} in its {role}; a recording in a file holds numbers.\n"
            "    Look at the recording as it is: the first layer with NaN says where it began."
        )


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
    if beginning and not is_recording and not beginning.startswith(MAGIC):
        raise RegardError(
            f"{path} exists and is not a recording; saving would lose it.\n"
            "    Save under another name, or remove that file first."
        )


def _remove_partials(folder: Path, beginning: str) -> None:
    """Remove partial files of this target that killed processes left behind."""
    for path in folder.glob(f"{escape(beginning)}.????????.partial"):
        if not is_locked(path):
            with suppress(OSError):
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to the disk, on systems that support it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
