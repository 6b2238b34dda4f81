"""Loading of recordings from files."""

import os

from regard.errors import RegardError, check_path
from regard.recording.file_reader import read
from regard.recording.recording import Recording, merged

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> Recording:
    """Load a recording that ``Recording.save`` or ``regard.observe`` with ``path=`` wrote.

    Opening is fast for files of any size. The tensors of a layer are read at its first use and
    compared with their checksums. No code from the file runs.

    A folder holds the parts of a distributed run, one file for each process. They are merged as by
    ``Recording.merge``.

    Args:
        path: the file, or the folder.

    Raises:
        FileNotFoundError: the file does not exist.
        RegardError: the file is not a recording, is damaged, or has a format that this version
            cannot read; or the files of the folder are not the parts of one run.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
        >>> regard.Recording({"layer": even}).save("run.safetensors")
        >>> regard.load("run.safetensors")["layer"].entropy()
        tensor([0.6931, 0.6931])
    """
    folder = check_path(path)
    if not folder.is_dir():
        return read(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RegardError(
            f"{folder} is a folder without recordings.\n"
            "    Give the path of a recording, or of the folder of a distributed run."
        )
    return merged([read(file) for file in files], [str(file) for file in files])
