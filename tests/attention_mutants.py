"""Right attention code, changed in one place on its syntax tree.

Each mutant is a file of ``attention_code/right`` with one operator, number, name or call changed.
Most are wrong; some are the same as before, such as ``k.shape[-1]`` for ``q.shape[-1]``.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attention_corpus import Case

__all__ = ["Mutant", "mutants_of"]

_OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Div: ast.Mult(),
    ast.Mult: ast.Div(),
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
}
_NUMBERS = {-1: -2, -2: -1, 0.5: 1.0, 1: 2, 2: 1, 3: 2}
_CALLS = {"tril": "triu", "triu": "tril", "repeat_interleave": "repeat", "transpose": "reshape"}
_DROPPED = ("transpose", "masked_fill", "softmax", "permute", "contiguous", "mT", "unsqueeze")
_NAMES = {"q": "k", "k": "v", "v": "q", "queries": "keys", "keys": "values", "values": "queries"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        case: the right file.
        number: of the change among all of the file.
        line: where it is.
        change: in words.
        source: the whole file after it.
    """

    case: Case
    number: int
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.case.path.stem}:{self.line} {self.change}"

    def write(self, folder: Path) -> Case:
        """Write the mutant as a file of its own."""
        path = folder / f"{self.case.path.stem}_{self.number}.py"
        first = self.case.path.read_text().partition("\n")[0]
        path.write_text(f"{first}\n{self.source}\n")
        return Case(path, {})


def mutants_of(case: Case) -> Iterator[Mutant]:
    """Yield every mutant of a file.

    Args:
        case: of ``right``.
    """
    source = case.path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    count = 0
    for place in range(len(nodes)):
        for which in range(2):
            tree = ast.parse(source)
            node = list(ast.walk(tree))[place]
            changed = _changed(node, which)
            if changed is None:
                continue
            words, new = changed
            tree = _Replaced(node, new).visit(tree)
            yield Mutant(case, count, getattr(node, "lineno", 0), words, ast.unparse(tree))
            count += 1


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


def _changed(node: ast.AST, which: int) -> tuple[str, ast.AST] | None:
    """Return a change in words and the node after it; None where there is none."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS and which == 0:
            new.op = _OPERATORS[type(operator)]
            return f"{type(operator).__name__} becomes {type(new.op).__name__}", new
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)) if which == 0:
            if -number not in _NUMBERS:
                return None
            return f"{-number} becomes {_NUMBERS[-number]}", ast.Constant(_NUMBERS[-number])
        case ast.UnaryOp(op=ast.Invert(), operand=operand) if which == 0:
            return "~ is forgotten", operand
        case ast.Call(func=ast.Attribute(attr=name, value=receiver)) if name in _DROPPED:
            return (f"{name} is dropped", receiver) if which == 0 else None
        case ast.Attribute(attr="mT", value=receiver) if which == 0:
            return "mT is dropped", receiver
        case ast.Attribute(attr=name) if name in _CALLS and which == 1:
            new.attr = _CALLS[name]
            return f"{name} becomes {new.attr}", new
        case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES and which == 0:
            return f"{name} becomes {_NAMES[name]}", ast.Name(_NAMES[name], ast.Load())
        case ast.keyword(arg="is_causal", value=ast.Constant(value=value)) if which == 0:
            new.value = ast.Constant(not value)
            return f"is_causal becomes {not value}", new
        case ast.Compare(ops=[ast.Eq()]) if which == 0:
            new.ops = [ast.NotEq()]
            return "== becomes !=", new
        case _:
            return None
