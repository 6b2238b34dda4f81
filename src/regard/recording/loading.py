"""Load a recording from its file."""

import os

from regard.recording.file_reader import read
from regard.recording.recording import Recording

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> Recording:
    """Load the recording that ``Recording.save`` wrote, or ``regard.observe`` with ``path=``.

    The file opens at once, whatever its size. The numbers of a layer are read when the layer is
    first asked for, and compared with their checksums. Nothing in the file is run.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: there is no such file.
        RegardError: it is no recording, is damaged, or of a format that this version cannot read.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
        >>> regard.Recording({"layer": even}).save("run.safetensors")
        >>> regard.load("run.safetensors")["layer"].entropy()
        tensor([0.6931, 0.6931])
    """
    stored = read(path)
    seen = Recording(
        {}, model=stored.model, query_tokens=stored.query_tokens, key_tokens=stored.key_tokens
    )
    seen.refused = list(stored.refused)
    for layer in stored.layers:
        seen.put(layer)
    return seen
