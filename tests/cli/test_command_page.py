"""docs/command.md is what the command says of itself."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_of_the_command_is_current() -> None:
    spec = importlib.util.spec_from_file_location("command_page", DOCS / "command_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (DOCS / "command.md").read_text(encoding="utf-8")
    assert written == module.page(), "run: python docs/command_page.py"
