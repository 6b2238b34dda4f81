"""What a notebook's cells compute themselves, outside of any class or function.

Learners build attention from small matrices, a product a cell. Two slips leave no trace where all
matrices are square: queries times keys that are not transposed, and weights that multiply the
columns of the values. Both are read from the operations, not from names. Each softmax is followed
besides from its scores to what its weights met.
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.catalogue import fault
from regard.diagnosis.interpretation import finding_of
from regard.diagnosis.notebook_cells import Cell, run_cell
from regard.diagnosis.notebook_chains import chains_of
from regard.diagnosis.notebook_verdicts import Verdict, judged
from regard.diagnosis.report import Finding, Report
from regard.diagnosis.softmax_detection import softmax_of, softmaxes
from regard.diagnosis.subject import Outcome
from regard.diagnosis.traced_run import Event, Trace, recorded
from regard.tracing.tracer import Listener, Operation, Tracer, apart

__all__ = ["Flows"]

# Of a matrix whose numbers people look at.
_MOST_TOKENS = 32
# Numbers of all tensors that are remembered, and how often an operation of one line is: a loop that
# trains runs many more.
_MOST_NUMBERS = 20_000_000
_LARGEST = 65_536
_MOST_REPEATED = 16
_MOST_EVENTS = 3_000
# Operations of small tensors that are remembered: a notebook that trains runs many more, and each
# is compared with all of them.
_MOST_KEPT = 1_000

_aten = torch.ops.aten
_REGARD = str(Path(__file__).parents[1])
_NOTHING = Outcome(torch.empty(0, device="cpu"), ())


@dataclass(frozen=True, slots=True)
class _Product:
    """Two tensors and what came of them; all are held, so that no other takes their place."""

    left: Tensor
    right: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class _Line:
    file: str
    line: int


@dataclass(eq=False)
class Flows:
    """Listens to the cells while they run, and finds both slips.

    Attributes:
        cells: of the notebook.
        findings: in the order of the cells.
    """

    cells: list[Cell]
    findings: list[Finding] = field(default_factory=list[Finding])
    _events: list[Event] = field(default_factory=list[Event])
    _held: list[Operation] = field(default_factory=list[Operation])
    _count: Counter[tuple[str, int, str]] = field(default_factory=Counter[tuple[str, int, str]])
    _learned: set[int] = field(default_factory=set[int])
    _numbers: int = 0
    _projections: list[_Product] = field(default_factory=list[_Product])
    _weights: list[Tensor] = field(default_factory=list[Tensor])
    _weighed: list[tuple[_Product, _Line]] = field(default_factory=list[tuple[_Product, _Line]])

    def __post_init__(self) -> None:
        self._own = {(cell.file, line) for cell in self.cells for line in _outside(cell.source)}

    def tracer(self) -> Tracer:
        """A tracer for one cell."""
        listeners: dict[Callable[..., Any], Listener] = {
            _aten.mm.default: self._mm,
            _aten._softmax.default: self._softmax,
            _aten.mul.Tensor: self._mul,
            _aten.sum.dim_IntList: self._sum,
        }

        def hear(operation: Operation) -> None:
            if _by_regard():
                return
            self._record(operation)
            if operation.func in listeners:
                listeners[operation.func](operation)

        return Tracer(nn.Identity(), {}, hear)

    def _record(self, operation: Operation) -> None:
        """Keep a copy of an operation on small tensors, unless its line ran very often."""
        output = operation.output
        parts = [t for t in (*operation.args, output) if isinstance(t, Tensor)]
        numbers = sum(part.numel() for part in parts)
        is_large = numbers > _LARGEST or self._numbers + numbers > _MOST_NUMBERS
        if is_large or len(self._events) >= _MOST_EVENTS:
            return
        caller = operation.caller()
        key = (caller.file, caller.line, str(operation.func))
        self._count[key] += 1
        if self._count[key] > _MOST_REPEATED or operation.func is _aten.detach.default:
            return
        self._numbers += numbers
        self._learned |= {
            part.untyped_storage().data_ptr() for part in parts if isinstance(part, nn.Parameter)
        }
        self._held.append(operation)  # no other tensor takes the place of its own
        with apart():
            self._events.append(recorded(operation, len(self._events), caller))

    def report(self, name: str, *, alone: bool) -> Report | None:
        """What was found in the cells; None where they hold no attention of their own.

        Args:
            name: of the notebook.
            alone: whether nothing else in it was checked: then what may be no attention is told.
        """
        verdicts = list(self._verdicts())
        for told in (told for verdict in verdicts for told in verdict.told):
            self._add(finding_of(told))
        real = [verdict for verdict in verdicts if verdict.is_attention]
        if not real and alone and not self.findings:
            real = verdicts
        missing = "\n".join(dict.fromkeys(each.missing for each in real if each.missing))
        if not self.findings and not missing and not (real and alone):
            return None
        return Report(name, tuple(self.findings), "the products of the cells themselves", missing)

    def _verdicts(self) -> Iterator[Verdict]:
        """One on each softmax whose line, or whose product with values, is the cells' own."""
        trace = Trace({event.place: event for event in self._events}, _NOTHING, frozenset())
        seen = softmaxes(trace)
        for event in seen:
            kept = {e.place: e for e in self._events if e is event or e not in seen}
            softmax = softmax_of(Trace(kept, _NOTHING, frozenset()), -1)
            if softmax is None or softmax.events[0] is not event or softmax.scores.ndim > 4:
                continue
            for chain in chains_of(self._events, softmax, self._learned):
                lines = [event.caller, chain.mixing.event.caller if chain.mixing else None]
                if any(c is not None and (c.file, c.line) in self._own for c in lines):
                    yield judged(self._events, chain)

    def _mm(self, operation: Operation) -> None:
        left, right = cast("tuple[Tensor, Tensor]", operation.args[:2])
        output = cast(Tensor, operation.output)
        if max(output.shape) > _MOST_TOKENS or len(self._projections) >= _MOST_KEPT:
            return
        query = self._projected(left)
        key = self._projected(right)
        if query is not None and key is not None and _same(query.left, key.left):
            with apart():
                right_scores = left @ right.mT
            self._found(
                "keys-not-transposed",
                operation,
                "Both were made from the same rows, and there are as many rows as columns.",
                (output, right_scores, "queries times keys"),
            )
        self._projections.append(_Product(left, right, output))

    def _projected(self, tensor: Tensor) -> _Product | None:
        """The product that a square matrix came from, as it lies there: not its transpose."""
        if tensor.shape[0] != tensor.shape[1]:
            return None
        return next((p for p in reversed(self._projections) if _same(p.output, tensor)), None)

    def _softmax(self, operation: Operation) -> None:
        output = cast(Tensor, operation.output)
        if output.ndim == 1 and len(output) <= _MOST_TOKENS and len(self._weights) < _MOST_KEPT:
            self._weights.append(output)

    def _mul(self, operation: Operation) -> None:
        """Weights times a square matrix: along its columns, as broadcasting has it."""
        pair = [t for t in operation.args[:2] if isinstance(t, Tensor)]
        if len(pair) != 2 or len(self._weighed) >= _MOST_KEPT:
            return
        for weights, values in (pair, pair[::-1]):
            square = values.ndim == 2 and values.shape == (len(weights), len(weights))
            if weights.ndim == 1 and square and any(_same(weights, w) for w in self._weights):
                caller = operation.caller()
                product = _Product(weights, values, cast(Tensor, operation.output))
                self._weighed.append((product, _Line(caller.file, caller.line)))

    def _sum(self, operation: Operation) -> None:
        summed = cast(Tensor, operation.args[0])
        for product, line in self._weighed:
            if _same(product.output, summed):
                with apart():
                    rows = product.left[:, None] * product.right
                self._found(
                    "values-mixed-along-wrong-axis",
                    operation,
                    "Read with one vector in each row; were each in a column, the sum along the "
                    "rows would be right.",
                    (product.output, rows, "weights times values"),
                    line,
                )

    def _found(
        self,
        name: str,
        operation: Operation,
        detail: str,
        proof: tuple[Tensor, Tensor, str],
        line: _Line | None = None,
    ) -> None:
        if line is None:
            caller = operation.caller()
            line = _Line(caller.file, caller.line)
        did, attention = (matrix.detach()[:4, :4].float() for matrix in proof[:2])
        entry = fault(name)
        self._add(
            Finding(entry, entry.severity, line.file, line.line, detail, did, attention, proof[2])
        )

    def _add(self, finding: Finding) -> None:
        place = (finding.name, finding.file, finding.line)
        if place not in {(f.name, f.file, f.line) for f in self.findings}:  # in a loop
            self.findings.append(finding)


def _by_regard() -> bool:
    """Whether regard itself runs the operation, as it does where a cell calls ``regard.check``."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not Tracer.__torch_dispatch__.__code__:
        frame = frame.f_back
    while (frame := frame and frame.f_back) and frame.f_code is not run_cell.__code__:
        if frame.f_code.co_filename.startswith(_REGARD):
            return True
    return False


def _outside(source: str) -> Iterator[int]:
    """The lines of a cell that belong to no class or function."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two are one tensor, or views of the same numbers in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
