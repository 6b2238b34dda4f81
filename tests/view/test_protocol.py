"""One table of questions for Python and TypeScript."""

from pathlib import Path

import pytest

from regard import view
from regard.view.tiles import protocol

WRITTEN = Path(view.__file__).parent / "web" / "protocol" / "questions.ts"


def test_the_typescript_is_that_of_the_table() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == protocol.typescript(), (
        "run python -m regard.view.tiles.protocol"
    )


def test_a_change_of_the_table_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol.QUESTIONS, "more", (protocol.Heads, protocol.Values))
    assert WRITTEN.read_text(encoding="utf-8") != protocol.typescript()
