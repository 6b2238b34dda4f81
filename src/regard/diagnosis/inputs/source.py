"""The statement that gave a name its value, in the source of somebody's code.

It tells where something is written that no operation of a run shows: a number, a buffer, a layer.
It is never evidence: which name carries a value is measured.
"""

import ast
import linecache
import math
from collections.abc import Sequence
from functools import cache

from regard.diagnosis.inputs.tape import Place, Step

_MOST_NAMES = 8
_VIEWS = ("view", "reshape", "unsqueeze", "to", "bool", "float", "contiguous", "type_as", "clone")


def names_at(line: Place) -> list[str]:
    """Return the names in the statement at a line, such as ``scale`` or ``self.scale``."""
    statement = _innermost(_tree(line.file), line.line, ast.stmt)
    return [] if statement is None else [*filter(None, map(_name, ast.walk(statement)))]


def assigned(name: str, line: Place, *, most: int = _MOST_NAMES) -> Place | None:
    """Return the line that gave a name the value that it has at a line; None if it is unknown.

    It is looked for in the class or the function that has the line, and then in the file. That of
    another name which is assigned to it leads on, at ``most`` so often.
    """
    tree = _tree(line.file)
    kind = ast.ClassDef if name.startswith("self.") else ast.FunctionDef
    holder = _innermost(tree, line.line, kind)
    assignments: list[tuple[int, ast.expr]] = []
    if holder is not None:
        assignments = [*filter(None, (_assignment(n, name) for n in ast.walk(holder)))]
        assignments = [pair for pair in assignments if pair[0] < line.line]
    is_parameter = isinstance(holder, ast.FunctionDef) and name in {
        each.arg for each in (*holder.args.args, *holder.args.kwonlyargs)
    }
    if not assignments and not is_parameter:
        assignments = [*filter(None, (_assignment(n, name) for n in tree.body))]
    if not assignments:
        return None
    number, value = max(assignments, key=lambda pair: pair[0])
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in _VIEWS:
            break
        value = value.func.value
    place, other = Place(line.file, number), _name(value)
    return (assigned(other, place, most=most - 1) if other and most else None) or place


def number_line(step: Step, numbers: Sequence[float], *, is_local: bool = False) -> str:
    """Return the ``file:line`` that assigned a number that a step was given; else the step's own.

    Args:
        step: the step.
        numbers: what it may be, beside the arguments of the step.
        is_local: the names of variables count, and those of attributes do not.
    """
    given = [v for v in (*step.args, *step.kwargs.values()) if isinstance(v, float)]
    for name in names_at(step.place) if step.place is not None else ():
        value = step.scope.get(name)
        if value is None or (is_local and name.startswith("self.")):
            continue
        if step.place and any(math.isclose(value, g, rel_tol=1e-6) for g in (*given, *numbers)):
            return str(assigned(name, step.place, most=0 if is_local else _MOST_NAMES) or step.line)
    return step.line


def _assignment(node: ast.AST, name: str) -> tuple[int, ast.expr] | None:
    """Return the line and the value of a statement that assigns a name; None for any other."""
    if isinstance(node, ast.Assign) and name in map(_name, node.targets):
        return node.lineno, node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_buffer"):
        match node.args:
            case [ast.Constant(value), tensor, *_] if f"self.{value}" == name:
                return tensor.lineno, tensor
            case _:
                pass
    return None


def _name(node: ast.AST) -> str:
    """Return ``x``, or ``self.x`` for the attribute of whatever name; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"self.{node.attr}"
    return ""


def _innermost(tree: ast.AST, line: int, kind: type[ast.AST]) -> ast.AST | None:
    """Return the smallest node of a kind that has a line."""
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or 0)  # pyright: ignore
    ]
    return min(nodes, key=lambda node: node.end_lineno - node.lineno, default=None)  # pyright: ignore


def _tree(file: str) -> ast.Module:
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # a cell of a notebook may have magics
        return ast.Module([], [])
