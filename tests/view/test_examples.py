"""The examples of internal modules of the view and the command give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent
NAMES = [
    ".".join(("regard", *path.relative_to(ROOT).with_suffix("").parts))
    for folder in ("view", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_give_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert (failed, tried > 0) == (0, True)
