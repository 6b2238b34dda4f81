"""The statement that gave a name its value, in the source of somebody's code.

It tells where something is written that no operation of a run shows: a number, a buffer, a layer.
It is never evidence: which name carries a value is measured.
"""

import ast
import inspect
import linecache
import math
from collections.abc import Sequence
from functools import cache

from regard.diagnosis.inputs.tape import Place, Step, is_theirs

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_NAMES = 8


def names_at(line: Place) -> list[str]:
    """Return the names in the statement at a line, such as ``scale`` or ``self.scale``."""
    tree = _tree(line.file)
    statement = None if tree is None else _innermost(tree, line.line, ast.stmt)
    return [] if statement is None else [*filter(None, map(_name, ast.walk(statement)))]


def assigned(name: str, line: Place, *, most: int = _MOST_NAMES) -> Place | None:
    """Return the line that gave a name the value that it has at a line; None if it is unknown.

    That of another name which is assigned to it leads on, at ``most`` so often; a parameter has the
    line of the only call.
    """
    tree = _tree(line.file)
    if tree is None:
        return None
    if name.startswith("self."):
        holder = _innermost(tree, line.line, ast.ClassDef)
        return (
            None
            if not isinstance(holder, ast.ClassDef)
            else _of_attribute(holder, name[5:], line.file, most)
        )
    function = _innermost(tree, line.line, _Function)
    if isinstance(function, _Function):
        before = [
            s
            for s in ast.walk(function)
            if isinstance(s, ast.Assign) and s.lineno < line.line and name in map(_name, s.targets)
        ]
        if before:
            last = max(before, key=lambda s: s.lineno)
            return _through(last.value, Place(line.file, last.lineno), most)
        if name in [each.arg for each in function.args.args]:
            return _of_call(tree, function, name, line.file, most)
    assignments = [
        s for s in tree.body if isinstance(s, ast.Assign) and name in map(_name, s.targets)
    ]
    return Place(line.file, assignments[-1].lineno) if assignments else None


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


def attribute_of(kind: type, name: str) -> Place | None:
    """Return the line in somebody's class that gives its objects an attribute."""
    for base in kind.__mro__:
        try:
            file = inspect.getsourcefile(base) or ""
        except (TypeError, OSError):  # a class that Python itself has, or a cell
            continue
        tree = _tree(file) if is_theirs(file) else None
        nodes = [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        for node in nodes:
            line = None
            if node.name == base.__name__:
                line = _of_attribute(node, name, file, _MOST_NAMES)
            if line is not None:
                return line
    return None


def _of_attribute(holder: ast.ClassDef, name: str, file: str, most: int) -> Place | None:
    for node in ast.walk(holder):
        value = None
        if isinstance(node, ast.Assign) and f"self.{name}" in map(_name, node.targets):
            value = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer":
            first, *rest = node.args or [None]
            is_it = isinstance(first, ast.Constant) and first.value == name
            value = rest[0] if is_it and rest else None
        if value is not None:
            return _through(value, Place(file, value.lineno), most)
    return None


def _through(value: ast.expr, line: Place, most: int) -> Place:
    """Return the line of a value; of a variable, or a view of one, the line that assigned it."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in _VIEWS:
            break
        value = value.func.value
    name = _name(value)
    return (assigned(name, line, most=most - 1) if name and most else None) or line


_VIEWS = ("view", "reshape", "unsqueeze", "to", "bool", "float", "contiguous", "type_as", "clone")


def _of_call(
    tree: ast.Module, function: _Function, name: str, file: str, most: int
) -> Place | None:
    """Return the line of what the only call of a function passes for a parameter."""
    parameters = [each.arg for each in function.args.args]
    holder = _innermost(tree, function.lineno, ast.ClassDef)
    called = function.name
    if isinstance(holder, ast.ClassDef):
        parameters = parameters[1:]
        called = holder.name if called == "__init__" else called
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == called
    ]
    if len(calls) != 1 or name not in parameters:
        return None
    by_name = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    at = parameters.index(name)
    value = by_name.get(name) or (calls[0].args[at] if at < len(calls[0].args) else None)
    return None if value is None else _through(value, Place(file, value.lineno), most)


def _name(node: ast.AST) -> str:
    """Return ``x`` or ``self.x``; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"self.{node.attr}" if node.value.id == "self" else ""
    return ""


def _innermost(tree: ast.AST, line: int, kind: type[ast.AST] | object) -> ast.AST | None:
    """Return the smallest node of a kind that has a line."""
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or 0)  # pyright: ignore
    ]
    return min(nodes, key=lambda node: node.end_lineno - node.lineno, default=None)  # pyright: ignore


def _tree(file: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(text: str) -> ast.Module | None:
    """Return a file whose methods all call their object ``self``; None if it does not compile."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell of a notebook may have magics
        return None
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for method in (node for holder in holders for node in holder.body):
        if not isinstance(method, _Function) or not method.args.args:
            continue
        name, method.args.args[0].arg = method.args.args[0].arg, "self"
        for node in ast.walk(method):
            if isinstance(node, ast.Name) and node.id == name:
                node.id = "self"
    return tree
