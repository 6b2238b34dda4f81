"""The file that opens the page in a browser: its token works once and is never printed."""

import secrets
import tempfile
from hmac import compare_digest
from pathlib import Path

__all__ = ["LaunchFile"]

_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>regard</title>
<p>This file opens the page of regard serve. <a href="{address}">Open it</a></p>
"""


class LaunchFile:
    """An HTML file that only this user can read, which leads a browser to the server.

    Its token lets one browser in. The file then gets another token, so that it can be opened again
    while the server runs; an address from a browser's history opens nothing.

    Args:
        address: of the server.

    Example:
        >>> from regard.view.server.launch_file import LaunchFile
        >>> with LaunchFile("http://127.0.0.1:8000/") as launch:
        ...     token = launch.path.read_text().partition("token=")[2].partition('"')[0]
        ...     launch.accepts(token), launch.accepts(token)
        (True, False)
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # A folder of mode 700: nobody else can read the file, or put another in its place.
        self._folder = tempfile.TemporaryDirectory(prefix="regard-serve-")
        self.path = Path(self._folder.name) / "open.html"
        self._token = ""
        self._write()

    def __enter__(self) -> "LaunchFile":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        self._folder.cleanup()

    def accepts(self, given: str) -> bool:
        """Return True if this is the token in the file, and replace it by a new one."""
        if not compare_digest(given.encode(), self._token.encode()):
            return False
        self._write()
        return True

    def _write(self) -> None:
        self._token = secrets.token_urlsafe(32)
        page = _PAGE.format(address=f"{self._address}?token={self._token}")
        new = self.path.with_suffix(".part")
        new.write_text(page, encoding="utf-8")
        new.chmod(0o600)
        new.replace(self.path)
