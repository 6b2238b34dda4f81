"""What a notebook shows where a matrix or a recording stands alone in a cell."""

from importlib import import_module
from typing import Any

__all__ = ["as_cell"]


def as_cell(self: Any, **_kinds: object) -> dict[str, Any]:
    """The page, for a notebook; nothing anywhere else, so that the text stands.

    It is the method ``_repr_mimebundle_`` of both. IPython calls it, and names kinds of media to
    include or exclude, which it then sees to by itself.

    Example:
        >>> import torch, regard
        >>> from regard.cells import as_cell
        >>> as_cell(regard.attend(torch.zeros(2, 1), torch.zeros(2, 1)))
        {}
    """
    # By its name: the core knows no view, and outside a notebook nothing here is loaded.
    return import_module("regard.see.notebook").bundle(self)
