"""An empty working folder."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
