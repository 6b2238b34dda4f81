"""The steps from a product of query and key to its scores, as far as operations tell them.

They are a first guess: ``evidence.py`` compares the scores that they give with all scores that
the model's softmax got. A step that is not read here, such as a mask, is found in these numbers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.capture.element_axes import Axes
from regard.tracing.tracer import Operation


@dataclass(frozen=True, slots=True)
class Term:
    """Numbers that were added to scores: factor · numbers, on the axes that the scores had."""

    numbers: Tensor
    axes: Axes
    factor: float


@dataclass(frozen=True, slots=True)
class Steps:
    """scores = cap · tanh(scale · product) + terms; without a cap, scale · product + terms.

    Attributes:
        eps: the largest relative rounding error of a step, that of the least precise dtype.
        is_learned: True if a tensor beside the scores that needs a gradient had another part than
            a sum, or if a hook or a function of the user's own changes the gradient.
        sink: a column that was put beside the scores, with the axes of one column; None without.
    """

    eps: float
    scale: float = 1.0
    cap: float | None = None
    terms: tuple[Term, ...] = ()
    is_learned: bool = False
    sink: tuple[Tensor, Axes] | None = None

    def after(self, operation: Operation, scores: Tensor, axes: Axes | None) -> "Steps":
        """Return the steps after one more operation, whose argument ``scores`` holds the scores.

        ``axes`` are those of its output; None if they are unknown.
        """
        output = operation.output
        eps = self.eps
        if isinstance(output, Tensor) and output.is_floating_point():
            eps = max(eps, torch.finfo(output.dtype).eps)
        steps = replace(self, eps=eps)
        func, args = str(operation.func).split(".")[1].rstrip("_"), operation.args
        operands = [each for each in args[:2] if each is not scores]
        if func == "neg":
            return steps._times(-1.0)
        if func == "tanh":
            return replace(steps, cap=1.0) if steps.cap is None and not steps.terms else steps
        if not operands or not isinstance(operands[0], Tensor | float | int):
            return steps
        operand = operands[0]
        if func in ("mul", "div"):
            if isinstance(operand, Tensor) and operand.numel() != 1:
                return steps
            factor = float(operand.detach() if isinstance(operand, Tensor) else operand)
            factor = factor if func == "mul" else 1 / factor if factor else 0.0
            return steps._times(factor)
        if func in ("add", "sub", "rsub"):
            alpha = float((*args[2:3], operation.kwargs.get("alpha", 1))[0])
            if func == "rsub" or (func == "sub" and operand is args[0]):
                return steps._times(-alpha).plus(operand, axes, 1.0)
            return steps.plus(operand, axes, -alpha if func == "sub" else alpha)
        return steps

    def plus(self, numbers: object, axes: Axes | None, factor: float) -> "Steps":
        """Return the steps after numbers were added; a single number changes no weight."""
        if not isinstance(numbers, Tensor) or axes is None or not numbers.is_floating_point():
            return self
        return replace(self, terms=(*self.terms, Term(numbers, axes, factor)))

    def _times(self, factor: float) -> "Steps":
        terms = tuple(replace(term, factor=term.factor * factor) for term in self.terms)
        if self.cap is None:
            return replace(self, scale=self.scale * factor, terms=terms)
        return replace(self, cap=self.cap * factor, terms=terms)
