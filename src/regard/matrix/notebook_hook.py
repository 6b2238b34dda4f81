"""The hook through which a notebook view registers itself.

A matrix and a recording display themselves in a notebook cell. The code that draws them is in
``regard.view``, which imports this module, not the other way round.
"""

from collections.abc import Callable
from typing import Any

_views: list[Callable[[Any], dict[str, Any]]] = []


def register_notebook_view(view: Callable[[Any], dict[str, Any]]) -> None:
    """Register the function that returns the MIME bundle of a matrix or a recording.

    Args:
        view: takes the object, returns its display data by MIME type; empty outside a notebook.
    """
    _views[:] = [view]


def notebook_bundle(self: Any, **_: object) -> dict[str, Any]:
    """Return what IPython displays for an object, by MIME type; empty outside a notebook.

    Classes use it as their ``_repr_mimebundle_`` method. IPython passes MIME types to include and
    exclude, and applies them itself.

    Example:
        >>> import torch, regard
        >>> from regard.matrix.notebook_hook import notebook_bundle
        >>> notebook_bundle(regard.attend(torch.zeros(2, 1), torch.zeros(2, 1)))
        {}
    """
    return _views[0](self) if _views else {}
