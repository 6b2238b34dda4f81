"""Load a recording from its file."""

import os
from pathlib import Path

from regard.errors import RegardError, check_path
from regard.recording.file_reader import read
from regard.recording.recording import Recording, merged

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> Recording:
    """Load the recording that ``Recording.save`` wrote, or ``regard.observe`` with ``path=``.

    The file opens at once, whatever its size. The numbers of a layer are read when the layer is
    first asked for, and compared with their checksums. Nothing in the file is run.

    The files of a folder are the parts of a distributed run, one for each process; they are joined
    to one recording as ``Recording.merge`` does.

    Args:
        path: of the file, or of a folder.

    Raises:
        FileNotFoundError: there is no such file.
        RegardError: it is no recording, is damaged, or of a format that this version cannot read;
            or the files of a folder are not the parts of one run.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
        >>> regard.Recording({"layer": even}).save("run.safetensors")
        >>> regard.load("run.safetensors")["layer"].entropy()
        tensor([0.6931, 0.6931])
    """
    folder = check_path(path)
    if not folder.is_dir():
        return _loaded(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RegardError(
            f"{folder} is a folder without recordings.\n"
            "    Give the path of a recording, or of the folder of a distributed run."
        )
    return merged([_loaded(file) for file in files], [str(file) for file in files])


def _loaded(path: Path) -> Recording:
    stored = read(path)
    seen = Recording(
        {}, model=stored.model, query_tokens=stored.query_tokens, key_tokens=stored.key_tokens
    )
    seen.refused, seen.shard = list(stored.refused), stored.shard
    for layer in stored.layers:
        seen.put(layer)
    return seen
