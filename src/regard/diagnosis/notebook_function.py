"""The bare cells of a notebook as one function, so that the laws can be tried on them."""

import ast
import contextlib
import copy
import time
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.capture.storages import storage_key
from regard.diagnosis.facts.trace import traced
from regard.diagnosis.inputs.notebook_cells import Cell
from regard.diagnosis.inputs.specimen import Slot, Specimen
from regard.diagnosis.intention import Intention
from regard.diagnosis.report import Report
from regard.diagnosis.stating import report_on

_MOST_SECONDS = 0.3
_MOST_TOKENS = 32
_MOST_PRODUCTS = 4
_DROPS = ("native_dropout", "bernoulli_", "bernoulli")
_UNKNOWN = (
    "Its cells run a softmax, and no product of its weights with values was seen that follows from "
    "one tensor of tokens. Make it a function, def attention(x): ..., and check that."
)


def report_of_cells(name: str, cells: list[Cell], module: ModuleType) -> Report | None:
    """Return the report on the attention that the cells compute outside of any function.

    Returns:
        None if the cells run no softmax of their own.
    """
    found = list(_bare(cells))
    if not any(has_softmax for _, _, has_softmax in found):
        return None
    for target, given in _leaves(cells, module):
        cut = _Cells(name, cells, module, target)
        with contextlib.suppress(Exception):  # somebody's code may raise anything
            reports = [report_on([specimen], Intention()) for specimen in cut.specimens(given)]
            if reports:
                return next((report for report in reports if report.faults), reports[0])
    return Report(name, (), "the cells themselves", _UNKNOWN)


def _bare(cells: list[Cell]) -> Iterator[tuple[Cell, list[ast.stmt], bool]]:
    """Yield the statements of each cell that belong to no class or function."""
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for cell in cells:
        try:
            body = ast.parse(cell.source).body
        except (SyntaxError, ValueError):
            continue
        own = [node for node in body if not isinstance(node, kept)]
        text = "\n".join(ast.unparse(node) for node in own)
        yield cell, own, any(word in text for word in ("softmax", ".exp(", "scaled_dot", "attn("))


def _leaves(cells: list[Cell], module: ModuleType) -> Iterator[tuple[str, Tensor]]:
    """Yield names of tensors that are made of no other tensor: one of them holds the tokens."""
    seen: set[str] = set()
    for _, body, _ in _bare(cells):
        for node in body:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target = node.targets[0]
            if not isinstance(target, ast.Name) or target.id in seen:
                continue
            seen.add(target.id)
            value = vars(module).get(target.id)
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            read = [t for name in names if isinstance(t := vars(module).get(name), Tensor)]
            is_leaf = not any(t.is_floating_point() for t in read)
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not is_leaf:
                continue
            is_small = value.ndim in (2, 3) and value.shape[-2] <= _MOST_TOKENS
            if is_small and value.is_floating_point():
                yield target.id, value.detach()


class _Recording(ast.NodeTransformer):
    """Records the value of every statement, and gives one name another value."""

    def __init__(self, target: str) -> None:
        self.target, self.is_open = target, True

    def visit_Assign(self, node: ast.Assign) -> Any:  # as ast calls it
        target = node.targets[0]
        if self.is_open and isinstance(target, ast.Name) and target.id == self.target:
            self.is_open = False
            node.value = ast.copy_location(ast.Name("__given__", ast.Load()), node.value)
        node.value = _recorded(node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        node.value = _recorded(node.value)
        return node


def _recorded(value: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name("__record__", ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


class _Cells:
    """The cells as a function of one of their tensors."""

    def __init__(self, name: str, cells: list[Cell], module: ModuleType, target: str) -> None:
        self.__name__, self.target = name, target
        self._names = vars(module)
        self._codes: list[CodeType] = []
        recording = _Recording(target)
        for cell, body, _ in _bare(cells):
            nodes = [recording.visit(copy.deepcopy(node)) for node in body]
            with contextlib.suppress(SyntaxError, ValueError):
                self._codes.append(compile(ast.Module(nodes, []), cell.file, "exec"))
        self._index: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Run the cells, and return what weights times values gave."""
        values = self._run(x)
        assert self._index is not None
        return values[self._index]

    def _run(self, x: Tensor) -> list[Tensor]:
        values: list[Tensor] = []

        def record(value: Any) -> Any:
            if isinstance(value, Tensor):
                values.append(value)
            return value

        torch.default_generator.manual_seed(0)  # the same weights in every run
        names = {**self._names, "__given__": x, "__record__": record}
        for code in self._codes:
            exec(code, names)  # what it is for
        return values

    def specimens(self, given: Tensor) -> Iterator[Specimen]:
        """Yield the cells up to each product of weights with values."""
        # A batch stays as it is: cells write its length down.
        axes: tuple[str | int, ...] = (*given.shape[:-2], "t", given.shape[-1])
        slot = Slot("x", "content", axes, "x")
        specimen = Specimen(
            self.__name__,
            self,
            (slot,),
            1,
            given.shape[-2],
            is_fixed=True,
            has_own_size=True,
            is_example=True,
        )
        start = time.process_time()
        self._run(given)
        if time.process_time() - start > _MOST_SECONDS:
            return
        values: list[Tensor] = []

        def run(x: Tensor) -> Tensor:
            values.extend(self._run(x))
            return values[-1]

        given = given.double()
        trace = traced(run, (given,), {}, (given,))
        if any(step.name in _DROPS for step in trace.steps):
            return
        attentions = [
            attention
            for attention in (*trace.attentions, *trace.changed)
            if trace.steps[attention.at].depends and not trace.steps[attention.at].projects
        ]
        for attention in attentions[:_MOST_PRODUCTS]:
            storage = storage_key(attention.live)
            at = [n for n, value in enumerate(values) if storage_key(value) == storage]
            if at:
                self._index = at[-1]  # merged, if a view of it is
                yield specimen
