"""The version of regard."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version


def version() -> str:
    """Return the version of regard; "unknown" if it is not installed as a package."""
    try:
        return _version("regard")
    except PackageNotFoundError:
        return "unknown"
