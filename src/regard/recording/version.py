"""The version of regard."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

__all__ = ["version"]


def version() -> str:
    """Return the version of regard; "unknown" if its source runs without being installed."""
    try:
        return _version("regard")
    except PackageNotFoundError:
        return "unknown"
