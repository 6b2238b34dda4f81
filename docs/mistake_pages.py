"""The page "28 ways attention goes wrong", made of the catalogue and of the code in mistakes/.

Each file of mistakes/ has a wrong and a right version of one attention, an example of its arguments,
and what the picture is drawn between. The picture shows how much each output depends on each input:
the absolute derivatives, added up. For an attention without projections these are its weights.
"""

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.catalogue import FAULTS, Fault

FOLDER = Path(__file__).parent / "mistakes"
_CELL = 22
_TOP = """# 28 ways attention goes wrong

Wrong attention code still trains. Its shapes are right, its loss goes down, and no error appears. Most of
these mistakes were found in public code, which "Seen in" names. Each one has the wrong line, the right line, and
two pictures. A picture has a row for each output token and a column for each input token, unless it says otherwise.
A cell is darker if the output depends more on the input. For plain attention this is the attention matrix.

`regard.check` looks for all of them in your own code, and names the line: [Checking code](check.md).

"""


def load(path: Path) -> ModuleType:
    """Import one file of mistakes/."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(module: ModuleType, kind: str) -> Any:
    """Return the ``wrong`` or ``right`` function or class of a file."""
    return getattr(module, kind, None) or getattr(module, kind.title())


def influence(module: ModuleType, kind: str) -> Tensor:
    """Return how much each output depends on each input, (outputs, inputs).

    The derivatives are those by the value, the third argument, or by the only one.

    Raises:
        RuntimeError: the code raises it.
    """
    torch.manual_seed(3)
    arguments = module.example()
    torch.manual_seed(5)
    made = code_of(module, kind)
    function = made().eval() if isinstance(made, type) else made
    place = 2 if len(arguments) > 2 else 0  # the value, or x
    varied = arguments[place]

    def output(value: Tensor) -> Tensor:
        return function(*arguments[:place], value, *arguments[place + 1 :])

    found = torch.autograd.functional.jacobian(output, varied)
    rows = varied.ndim if found.ndim == 2 * varied.ndim else found.ndim - varied.ndim
    size = found.abs()
    kept_rows, kept_columns = _kept(module.BETWEEN, rows), _kept(module.BETWEEN, varied.ndim)
    summed = [axis for axis in range(rows) if axis not in kept_rows]
    summed += [rows + axis for axis in range(varied.ndim) if axis not in kept_columns]
    size = size.sum(summed)
    return size.flatten(0, len(kept_rows) - 1).flatten(1) / found.shape[rows - 1]


def _kept(between: str, axes: int) -> list[int]:
    """Return the axes that a picture shows; the others are added up."""
    return {
        "tokens": [0, axes - 2],  # batch and tokens; heads and columns are added up
        "tokens_first": [0, 1],
        "heads": [1],
        "columns": [axes - 1],
    }[between]


def picture(numbers: Tensor, label: str) -> str:
    """Draw numbers as an SVG heat map; NaN is crossed out."""
    height, width = (_CELL * n + 2 for n in numbers.shape)
    top = float(numbers.nan_to_num().max()) or 1.0
    cells: list[str] = []
    for i, row in enumerate(numbers.tolist()):
        for j, number in enumerate(row):
            x, y = 1 + j * _CELL, 1 + i * _CELL
            if number != number:
                line = f'<path d="M{x} {y}l{_CELL} {_CELL}m0 -{_CELL}l-{_CELL} {_CELL}"/>'
                cells.append(f"{line}<title>NaN</title>")
                continue
            cells.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" '
                f'fill-opacity="{number / top:.3f}"><title>{number:.3f}</title></rect>'
            )
    return (
        f'<svg class="matrix" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><rect class="frame" x="1" y="1" width="{width - 2}" '
        f'height="{height - 2}"/>{"".join(cells)}</svg>'
    )


def _drawn(module: ModuleType, kind: str) -> str:
    try:
        numbers = influence(module, kind)
    except RuntimeError as error:
        return f'<p class="error">RuntimeError: {str(error).splitlines()[0]}</p>'
    return picture(numbers, f"{kind}: how much each output depends on each input")


def _source(module: ModuleType, kind: str) -> str:
    """Return one version as a fenced block; the lines that differ from the other are marked."""
    file = Path(str(module.__file__)).read_text()
    nodes = {getattr(node, "name", "").lower(): node for node in ast.parse(file).body}
    texts = {
        name: re.sub(
            r"\b(wrong|right|Wrong|Right)\b(?=\()",
            lambda found: "attention" if found[0].islower() else "Attention",
            ast.get_source_segment(file, nodes[name]) or "",
        ).splitlines()
        for name in ("wrong", "right")
    }
    other = texts["right" if kind == "wrong" else "wrong"]
    marked = [str(i) for i, line in enumerate(texts[kind], 1) if line not in other]
    lines = f' hl_lines="{" ".join(marked)}"' if marked else ""
    text = "\n".join(texts[kind])
    return f"**{kind.title()}**\n\n```{{.python{lines}}}\n{text}\n```\n"


def _entry(fault: Fault, path: Path) -> str:
    module = load(path)
    title = fault.name.replace("-", " ").capitalize().replace("Nan", "NaN").replace("Kv", "KV")
    figures = "".join(
        f"<figure>{_drawn(module, kind)}<figcaption>{kind}</figcaption></figure>"
        for kind in ("wrong", "right")
    )
    example = inspect.getdoc(module.example)
    seen = f"\n\nSeen in {', '.join(fault.sources)}." if fault.sources else ""
    return (
        f"## {fault.number}. {title} {{ #{fault.name} }}\n\n{fault.sentence}\n\n"
        f"{_source(module, 'wrong')}\n{_source(module, 'right')}\n"
        f'<div class="pair">{figures}<p>{example}</p></div>\n\n'
        f"`regard.check` calls it `{fault.name}`.{seen}\n"
    )


def page() -> str:
    """Return the whole page as Markdown."""
    files = {int(path.name[:2]): path for path in FOLDER.glob("[0-9]*.py")}
    return _TOP + "\n".join(_entry(fault, files[fault.number]) for fault in FAULTS)
