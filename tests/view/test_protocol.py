"""One table of questions for Python and TypeScript."""

import pytest

from questions_in_typescript import WRITTEN, typescript
from regard.view.tiles import protocol


def test_the_typescript_is_that_of_the_table() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == typescript(), (
        "run python tests/questions_in_typescript.py"
    )


def test_a_change_of_the_table_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol.QUESTIONS, "more", (protocol.Heads, protocol.Values))
    assert WRITTEN.read_text(encoding="utf-8") != typescript()
