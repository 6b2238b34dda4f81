"""What the tests of the command ``regard`` share."""

import sys
from collections.abc import Callable
from pathlib import Path

REGARD = Path(sys.executable).with_name("regard")
Run = Callable[..., tuple[int, str, str]]


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
