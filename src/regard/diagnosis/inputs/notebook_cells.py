"""A notebook's cells: read from its file, and run one after the other in one namespace."""

import ast
import asyncio
import inspect
import json
import linecache
import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")  # the rest of the cell is Python
_ASSIGNED = re.compile(r"(\s*[\w, ]+=)\s*[!%].*")  # files = !ls


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of code.

    Attributes:
        file: what tracebacks call it: ``lesson.ipynb, cell 3``; counted as people do, from 1, and
            without the cells of text.
        source: plain Python; a line that is none, such as ``%matplotlib inline``, is left out.
    """

    file: str
    source: str


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of code of a notebook, in their order.

    Raises:
        ValueError: it is no notebook.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sources = list(_sources(json.loads(text)))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path.name} is not UTF-8 from byte {error.start} on; a notebook must be.\n"
            "    Open it in Jupyter and save it again."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path.name} is no notebook; an .ipynb is JSON with cells.\n"
            "    Open it in Jupyter and save it again."
        ) from error
    return [
        Cell(f"{path.name}, cell {number}", _plain_python(source))
        for number, source in enumerate(sources, start=1)
    ]


def namespace(name: str, cells: list[Cell]) -> ModuleType:
    """Return an empty module for cells; ``inspect.getsource`` finds their classes in it."""
    module = ModuleType(name)
    module.__file__ = f"{name}, all cells"
    sys.modules[name] = module
    # Outside Jupyter both of them are missing, and neither has to do with attention.
    vars(module).update(display=_show_nothing, get_ipython=_Jupyter)
    # With a cell that does not compile no class would be found in any of them.
    _remember(module.__file__, "\n".join(c.source for c in cells if _compiles(c.source)))
    for cell in cells:
        _remember(cell.file, cell.source)
    return module


def run_cell(cell: Cell, module: ModuleType) -> None:
    """Run one cell.

    Raises:
        BaseException: whatever the cell raises.
    """
    refuse_null_bytes(cell.source, cell.file)
    code = compile(cell.source, cell.file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, vars(module)))  # noqa: S307  # a cell with `await`
    else:
        exec(code, vars(module))  # what it is for


def refuse_null_bytes(source: str, file: str) -> None:
    """Raise what Python should: its own error for a null byte names neither file nor line.

    Raises:
        SyntaxError: there is one.
    """
    for number, line in enumerate(source.splitlines(), start=1):
        if "\0" in line:
            raise SyntaxError("there is a null byte", (file, number, line.index("\0") + 1, line))


def _sources(notebook: Any) -> Generator[str]:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source: Any = cell["source"]
            yield source if isinstance(source, str) else "".join(source)


def _plain_python(source: str) -> str:
    """Without what only Jupyter understands; every line keeps its number."""
    if source.lstrip().startswith("%%") and source.split()[0] not in _PYTHON_CELLS:
        return ""  # the whole cell is in another language
    if _compiles(source):
        return source  # a line that begins with % may be the rest of a product
    return "\n".join(_line(line) for line in source.splitlines())


def _compiles(source: str) -> bool:
    try:
        compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return True


def _line(line: str) -> str:
    if assigned := _ASSIGNED.fullmatch(line):
        return f"{assigned[1]} []"
    bare = line.strip()
    if bare.startswith(("%", "!", "?")) or (bare.endswith("?") and "#" not in bare):
        return f"{line[: len(line) - len(line.lstrip())]}pass"
    return line


def _remember(file: str, source: str) -> None:
    lines = [f"{line}\n" for line in source.splitlines()]
    linecache.cache[file] = (len(source), None, lines, file)


def _show_nothing(*_: object, **__: object) -> None:
    return None


class _Jupyter:
    """Stands for the shell of a notebook: whatever it is asked for does nothing."""

    def __getattr__(self, name: str) -> Any:
        return _show_nothing
