"""Attention code as people write it, for ``check`` to judge: ``attention_code/``.

A file's first line is the call that a person would make, with the names of that file:
``# regard.check(SelfAttention, 16, 4, causal=True)``. The second one says what its author meant:
``# regard.spec(causal=True, heads=4)``, or `` - another kind`` behind it. In ``faulty/``, each line
to be found says which finding belongs there: ``# <- no-scale``, several names separated by commas.
One name on two lines: either will do; on the first line: anywhere. ``right/`` has no such lines,
nor has ``beyond/``: other kinds of attention, and none. In ``recent/`` to ``recent_four/`` a line
may also name a law that it breaks: ``# <- law cache``.
"""

import ast
import importlib.util
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import regard

FOLDER = Path(__file__).parent / "diagnosis" / "attention_code"
_MARKER = re.compile(r"# <- ([a-z0-9, -]+)$")


@dataclass(frozen=True)
class Call:
    """The arguments of ``regard.check``, worked out with the names of the file."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One file of the corpus.

    Attributes:
        path: of the file.
        expected: the lines where each finding may be, by its name: line 1 is anywhere. Empty for
            what is right.
    """

    path: Path
    expected: dict[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def intention(self) -> Any:
        """What its author meant: a spec."""
        source = self.path.read_text().splitlines()[1].removeprefix("# ")
        return eval(source.partition(" - another kind")[0], {"regard": regard})

    def call(self) -> Call:
        """Import the file anew, and work its first line out."""
        source = self.path.read_text().partition("\n")[0].removeprefix("# ")
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call), f"{self.name}: its first line is no call"
        assert ast.unparse(call.func) == "regard.check", f"{self.name}: its first line is no check"
        names = vars(_imported(self.path))

        def value(node: ast.expr) -> Any:
            return eval(compile(ast.Expression(node), self.path.name, "eval"), names)

        return Call(
            tuple(value(argument) for argument in call.args),
            {keyword.arg: value(keyword.value) for keyword in call.keywords if keyword.arg},
        )


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corpus_{uuid.uuid4().hex}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cases(folder: str) -> list[Case]:
    """The files of ``faulty``, ``right`` or ``beyond``, by their names."""
    return [_case(path) for path in sorted((FOLDER / folder).glob("*.py"))]


def _case(path: Path) -> Case:
    expected: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        marker = _MARKER.search(line)
        for name in marker[1].split(", ") if marker else ():
            expected[name] = (*expected.get(name, ()), number)
    return Case(path, expected)
