"""Packages that only a part of regard needs."""

from importlib import import_module
from typing import Any

from regard.errors.exceptions import RegardError


def optional_module(module: str, needed: str, install: str) -> Any:
    """Return a module of a package that may be missing.

    Args:
        module: its name.
        needed: the beginning of the error, such as "pictures need Pillow".
        install: the words after ``pip install``.

    Raises:
        RegardError: the package is not installed.

    Example:
        >>> from regard.errors import optional_module
        >>> optional_module("json", "tables need json", "json").dumps([1, 2])
        '[1, 2]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise RegardError(
            f"{needed}, which is not installed.\n    Run: pip install {install}"
        ) from error
