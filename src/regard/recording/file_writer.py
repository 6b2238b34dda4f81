"""Writing a recording, layer by layer: its file appears whole, or not at all.

The data follow a gap at the beginning of a partial file beside the target. The header, which has to
stand there, is known last: it goes into the gap, and if that is too small the data move on. Then
the file takes its name, and an older one of that name is whole until this moment.
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
"""The version of the format that is written. Files of format 1 have no checksums."""

KEY = "regard"
"""The key of a recording's JSON in the metadata of a safetensors file."""

_OPEN: WeakValueDictionary[Path, "Writer"] = WeakValueDictionary()  # by what each will replace

_GAP = 2**16
_ALIGNED = 8
_AT_ONCE = 2**24


class Writer:
    """A recording that is being written; memory does not grow with the layers.

    ``finish`` gives the file its name. Until then, and after ``abandon``, an older recording of
    that name is unchanged. A recording takes the place of recordings alone, not of other files.

    Args:
        path: of the file; its folder exists.

    Raises:
        TypeError: path is no path.
        ValueError: path is empty.
        RegardError: no file can be written there, or one is being written already; or, when the
            disk is full, not any more: the partial file is gone then.

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
        # A link stays, and what it leads to is written.
        self._target = Path(os.path.realpath(self.path))
        # Fifty characters, of at most four bytes each, leave room for the rest in any file name.
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
            with suppress(OSError):  # not all file systems can
                _lock(self._file.fileno())
            self._file.seek(_GAP)
        except OSError as error:
            raise self._failed(error) from error
        _OPEN[self._target] = self

    def add(self, layer: Layer) -> None:
        """Write one more layer. A tensor that an earlier one holds, too, is written once.

        Args:
            layer: no other has its name.

        Raises:
            RegardError: it holds code, or NaN; nothing of the layer is written then. The disk is
                full; the partial file is gone then.
            ValueError: a name that is taken.
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
        """Write what is known of all layers, and give the file its name.

        Args:
            model: the name of the model.
            query_tokens: one token for each query.
            key_tokens: one token for each key.
            refused: the modules whose attention was not recorded.
            shard: the place of the recording in a distributed run.

        Raises:
            RegardError: the disk is full; the partial file is gone then.
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
        with suppress(OSError):  # what is still to be written cannot be either
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _release(self) -> None:
        if _OPEN.get(self._target) is self:
            del _OPEN[self._target]

    def _written(self, name: str, tensor: Tensor) -> str:
        """Return the name of a tensor in the file, after writing it if it is not there yet."""
        here = tensor.detach().cpu().contiguous()
        found = checksum(_bytes(here))
        known = here.dtype, here.shape, found
        if known not in self._names:
            if self._end % _ALIGNED:  # the format has no gaps
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
        """Move the data towards the end, the last part first."""
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
        path: of the file; its folder exists.
        layers: in their order.
        model: the name of the model.
        query_tokens: one token for each query.
        key_tokens: one token for each key.
        refused: the modules whose attention was not recorded.
        shard: the place of the recording in a distributed run.
        progress: called with the layers written and the layers in all.

    Raises:
        RegardError: a layer holds code, or NaN; the file cannot be written. What was there before
            is as it was.

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
        _plain_layer(layer, {})  # what cannot be saved is said before anything is written
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
    """Refuse to replace a file that is neither empty nor a recording.

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
    """Return a layer as plain data; ``pending`` receives its tensors by the names that they get."""

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
    """Remove the partial files of this name that processes left when they were killed."""
    for path in folder.glob(f"{escape(beginning)}.????????.partial"):
        with suppress(OSError), path.open("rb") as file:  # a living writer holds the lock
            _lock(file.fileno())
            path.unlink()


def _lock(handle: int) -> None:
    """Lock an open file until it is closed.

    Raises:
        OSError: another one has locked it.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, on systems that can."""
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
    """Return the bytes of a contiguous tensor on the CPU, which must outlive them; no copy."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
