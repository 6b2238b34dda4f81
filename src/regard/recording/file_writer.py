"""An atomic writer of recordings, which writes one layer after the other.

The tensors are written to a partial file next to the target, after a gap at its beginning. The
header belongs there but is only known at the end. It is written into the gap; if the gap is too
small, the tensors are moved first. Then the partial file is renamed to the target. An older file
with that name stays complete until then.
"""

import json
import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from ctypes import c_char
from glob import escape
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE
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
from regard.recording.layers import Layer, Refusal
from regard.recording.shard import Shard
from regard.recording.tensor_file import DTYPES, checksum, packed_header
from regard.recording.version import version
from regard.text.tokens import Token, as_tokens

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where an open file cannot be removed
    fcntl = None

__all__ = ["FORMAT", "KEY", "Writer", "check_replaceable", "write"]

FORMAT = 2
"""The version of the file format. Files of format 1 have no checksums."""

KEY = "regard"
"""The key of a recording's JSON in the metadata of a safetensors file."""

_OPEN: WeakValueDictionary[Path, "Writer"] = WeakValueDictionary()  # open writers by target

_GAP = 2**16
_ALIGNED = 8
_AT_ONCE = 2**24


class Writer:
    """A writer of one recording, whose memory does not grow with the number of layers.

    ``finish`` renames the partial file to the target. Until then, and after ``abandon``, an older
    recording with that name is unchanged. Only recordings are replaced, and no other files.

    Args:
        path: the file, in an existing folder.

    Raises:
        TypeError: path is not a path.
        ValueError: path is empty.
        RegardError: the file cannot be written, or another writer is writing it. If the disk is
            full, the partial file is removed.

    Example:
        >>> import torch, regard
        >>> from regard.recording.file_writer import Writer
        >>> from regard.recording.file_reader import read
        >>> writer = Writer("run.safetensors")
        >>> x = torch.zeros(2, 3, 4)
        >>> [layer] = regard.Recording({"layer": regard.attend(x, x)}).layers
        >>> writer.add(layer)
        >>> writer.finish(model="Tiny")
        >>> read("run.safetensors").layers[0].shape
        torch.Size([2, 3, 3])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path(path)
        # If the path is a link, its target is replaced and the link stays.
        self._target = Path(os.path.realpath(self.path))
        # 50 characters have at most 200 bytes, so the suffix fits into a file name of 255 bytes.
        beginning = self._target.name[:50]
        self._partial = self._target.with_name(f"{beginning}.{token_hex(4)}.partial")
        self._names: dict[Hashable, str] = {}
        self._checksums: dict[str, str] = {}
        self._entries: dict[str, Plain] = {}
        self._layers: list[Plain] = []
        self._end = 0
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
            self._file = self._partial.open("x+b")
            with suppress(OSError):  # some file systems have no locks
                _lock(self._file.fileno())
            self._file.seek(_GAP)
        except OSError as error:
            raise self._failed(error) from error
        _OPEN[self._target] = self

    def add(self, layer: Layer) -> None:
        """Write a layer. A tensor that an earlier layer has as well is written once.

        Args:
            layer: the layer, with a unique name.

        Raises:
            RegardError: the layer contains code or NaN, and nothing of it is written; or the disk
                is full, and the partial file is removed.
            ValueError: the name is not unique.
        """
        if any(other["name"] == layer.name for other in self._layers):
            raise ValueError(
                f"layer has the name {layer.name!r}, which another has already; each has its own.\n"
                "    Write it under another name."
            )
        pending: dict[str, Tensor] = {}
        plain = _plain_layer(layer, pending)
        try:
            names = {role: self._written(role, tensor) for role, tensor in pending.items()}
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error
        self._layers.append({**plain, "tensors": names})

    def finish(
        self,
        *,
        model: str = "",
        query_tokens: Iterable[Token] | None = None,
        key_tokens: Iterable[Token] | None = None,
        refused: Iterable[Refusal] = (),
        shard: Shard | None = None,
    ) -> None:
        """Write the header, and rename the partial file to the target.

        Args:
            model: the name of the model.
            query_tokens: one token for each query.
            key_tokens: one token for each key.
            refused: the modules whose attention was not recorded.
            shard: the place of the recording in a distributed run.

        Raises:
            RegardError: the disk is full, and the partial file is removed.
        """
        about = {
            "format": FORMAT,
            "regard": version(),
            "torch": torch.__version__,
            "model": model,
            "query_tokens": _plain_tokens("query_tokens", query_tokens),
            "key_tokens": _plain_tokens("key_tokens", key_tokens),
            "refused": list(refused),
            **({} if shard is None else {"shard": shard._asdict()}),
            "layers": self._layers,
        }
        try:
            self._write_header({KEY: json.dumps(about)})
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

    def abandon(self) -> None:
        """Remove the partial file; the recording is not written."""
        self._release()
        with suppress(OSError):  # closing may fail to flush
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _release(self) -> None:
        if _OPEN.get(self._target) is self:
            del _OPEN[self._target]

    def _written(self, name: str, tensor: Tensor) -> str:
        """Write a tensor unless the file contains an equal one, and return its name there."""
        here = tensor.detach().cpu().contiguous()
        found = checksum(_bytes(here))
        known = here.dtype, here.shape, found
        if known not in self._names:
            if self._end % _ALIGNED:  # safetensors allows no gaps, so a tensor fills them
                filler = torch.zeros(-self._end % _ALIGNED, dtype=torch.uint8, device="cpu")
                self._append(f"filler.{len(self._entries)}", filler, checksum(_bytes(filler)))
            self._append(name, here, found)
            self._names[known] = name
        return self._names[known]

    def _append(self, name: str, tensor: Tensor, found: str) -> None:
        self._file.write(_bytes(tensor))
        start, self._end = self._end, self._end + tensor.nbytes
        self._checksums[name] = found
        self._entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._end],
        }

    def _write_header(self, metadata: dict[str, str]) -> None:
        header = packed_header(metadata, self._checksums, self._entries, _GAP)
        if len(header) > _GAP:
            self._move(len(header) - _GAP)
        self._file.seek(0)
        self._file.write(header)

    def _move(self, by: int) -> None:
        """Move the tensors towards the end of the file, the last part first."""
        for start in range((self._end - 1) // _AT_ONCE * _AT_ONCE, -1, -_AT_ONCE):
            self._file.seek(_GAP + start)
            part = self._file.read(min(_AT_ONCE, self._end - start))
            self._file.seek(_GAP + start + by)
            self._file.write(part)

    def _failed(self, error: OSError) -> RegardError:
        return RegardError(
            f"{self.path} cannot be written: {error.strerror}; nothing of it is left, "
            "and a file that was there is as it was.\n"
            "    Save it where there is room and you may write."
        )


def write(
    path: str | os.PathLike[str],
    layers: Iterable[Layer],
    *,
    model: str = "",
    query_tokens: Iterable[Token] | None = None,
    key_tokens: Iterable[Token] | None = None,
    refused: Iterable[Refusal] = (),
    shard: Shard | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a recording as one file; see ``Writer``.

    Args:
        path: the file, in an existing folder.
        layers: the layers in their order.
        model: the name of the model.
        query_tokens: one token for each query.
        key_tokens: one token for each key.
        refused: the modules whose attention was not recorded.
        shard: the place of the recording in a distributed run.
        progress: called with the number of written layers and the number of layers.

    Raises:
        RegardError: a layer contains code or NaN, or the file cannot be written. An older file is
            unchanged.

    Example:
        >>> import torch, regard
        >>> from regard.recording.file_reader import read
        >>> from regard.recording.file_writer import write
        >>> seen = regard.Recording({"a": regard.attend(torch.zeros(3, 4), torch.zeros(3, 4))})
        >>> write("run.safetensors", seen.layers, model="Tiny")
        >>> read("run.safetensors").model
        'Tiny'
    """
    layers = tuple(layers)
    for layer in layers:
        _plain_layer(layer, {})  # raises for a layer that cannot be saved, before any writing
    writer = Writer(path)
    try:
        for done, layer in enumerate(layers, 1):
            writer.add(layer)
            if progress is not None:
                progress(done, len(layers))
        writer.finish(
            model=model,
            query_tokens=query_tokens,
            key_tokens=key_tokens,
            refused=refused,
            shard=shard,
        )
    except BaseException:
        writer.abandon()
        raise


def check_replaceable(path: Path) -> None:
    """Raise an error if a file exists that is neither empty nor a recording.

    Raises:
        RegardError: there is such a file.

    Example:
        >>> from pathlib import Path
        >>> from regard.recording.file_writer import check_replaceable
        >>> check_replaceable(Path("a new file.safetensors"))
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


def _plain_layer(layer: Layer, pending: dict[str, Tensor]) -> Plain:
    """Convert a layer to plain data, and add its tensors to ``pending`` by their names."""

    def put(role: str, tensor: Tensor) -> str:
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
        name = f"{layer.name}/{role}"
        pending[name] = tensor
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
