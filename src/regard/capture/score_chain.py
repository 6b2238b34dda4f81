"""Conversion of a product of query and key, and the steps after it, to an AttentionMatrix.

A step is one operation between the product and the softmax, with the axes of the scores at that
time. The steps are rearranged into the order of ``attend``: scale, bias, softcap, mask, sink. A
step that does not fit raises ``Unsupported`` with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes, Numbers, translated
from regard.capture.matrix_axes import Layout, Unsupported, layout_of
from regard.capture.slicing import drop_repeated_heads
from regard.masks import Mask
from regard.masks.recognise import FAR, recognised, split
from regard.matrix.attention_matrix import AttentionMatrix, attend

__all__ = [
    "Fill",
    "Plus",
    "Sink",
    "Step",
    "Tanh",
    "Times",
    "attention_of_steps",
]

LOW = -1e3
"""A score that is set to this or less is masked: its weight is 0 next to any other score."""


@dataclass(frozen=True, slots=True)
class Times:
    """The product scores · factor, or the quotient scores / factor."""

    factor: Tensor | float
    axes: Axes
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Plus:
    """The sum scores + factor · numbers."""

    numbers: Tensor | float
    axes: Axes
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Fill:
    """Scores set to a value where ``where`` is True."""

    where: Tensor
    axes: Axes
    value: float


@dataclass(frozen=True, slots=True)
class Tanh:
    """The hyperbolic tangent of the scores."""

    axes: Axes


@dataclass(frozen=True, slots=True)
class Sink:
    """A column next to the scores that takes part in the softmax and has no value."""

    column: Tensor
    axes: Axes
    before: bool


Step: TypeAlias = Times | Plus | Fill | Tanh | Sink


def attention_of_steps(
    product: Product,
    steps: Sequence[Step],
    axes: Axes,
    dim: int,
    inputs: Sequence[Sequence[Tensor]] = (),
    *,
    heads_first: bool = False,
) -> tuple[AttentionMatrix, Axes]:
    """Return the matrix whose weights a softmax computed, and its axes in the product.

    The matrix is made of the model's own tensors. It has the axes of the softmax, or of an earlier
    view of the scores with more axes. ``inputs`` and ``heads_first`` are as in ``layout_of``.

    Raises:
        Unsupported: a matrix cannot represent the steps; the message is the reason.
        ValueError: ``attend`` refuses an argument.
        TypeError: ``attend`` refuses the type or dtype of an argument.
    """
    sink = next((step for step in steps if isinstance(step, Sink)), None)
    final = axes
    if sink is not None:
        sizes = tuple(n - (axis == dim) for axis, n in enumerate(axes.sizes))
        first = axes.places[dim] if sink.before else 0
        final = replace(axes, sizes=sizes, start=axes.start + first)
    passed = [step.axes for step in steps]
    layout = layout_of(product, final, dim, passed, inputs, heads_first=heads_first)
    return _Reading(product, layout, tuple(steps)).matrix(), layout.axes


@dataclass(eq=False)
class _Reading:
    """The steps, rearranged into the order of ``attend``."""

    product: Product
    layout: Layout
    steps: tuple[Step, ...]
    scale: float = 1.0
    bound: float | None = None
    sink: Tensor | None = None
    by_row: list[Tensor] = field(default_factory=list[Tensor])
    by_key: list[Tensor] = field(default_factory=list[Tensor])
    inner: list[Tensor] = field(default_factory=list[Tensor])
    outer: list[Tensor] = field(default_factory=list[Tensor])
    shifts: list[Tensor] = field(default_factory=list[Tensor])
    fills: list[tuple[Tensor, float]] = field(default_factory=list[tuple[Tensor, float]])
    zeros: list[Tensor] = field(default_factory=list[Tensor])

    def matrix(self) -> AttentionMatrix:
        for step in self.steps:
            match step:
                case Times():
                    self._times(step)
                case Plus():
                    self._plus(step)
                case Fill():
                    self._fill(step)
                case Tanh():
                    self._tanh()
                case Sink():
                    self.sink = self._arranged(step.column, step.axes)
                    self.outer, self.shifts = [*self.outer, *self.shifts], []
        return self._attend()

    def _arranged(self, numbers: Tensor | float, axes: Axes) -> Tensor:
        """Return a step's operand on the axes of the matrix; axes with constant values are 1."""
        device = self.product.left.device
        tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, device=device)
        view = axes.arranged(tensor, self.layout.axes)
        if view is None:
            view = axes.arranged(tensor.expand(axes.sizes).contiguous(), self.layout.axes)
        if view is None:
            raise Unsupported("is taken of scores and numbers whose axes do not fit.")
        return view

    def _times(self, step: Times) -> None:
        factor = self._arranged(step.factor, step.axes)
        if step.divides:
            factor = factor.double().reciprocal() if factor.numel() == 1 else factor.reciprocal()
        if factor.numel() == 1:
            self._scale_by(float(factor))
        elif bool(((factor == 0) | (factor == 1)).all()):
            if not bool(factor.all()):
                self.zeros.append(factor == 0)
        elif self.bound is not None or self.sink is not None or self.fills or self.zeros:
            raise Unsupported(
                "is taken of scores that were multiplied by different numbers after masking."
            )
        else:
            if factor.shape[-1] == 1:
                self.by_row.append(factor)
            elif factor.shape[-2] == 1:
                self.by_key.append(factor)
            else:
                raise Unsupported(
                    "is taken of scores that were each multiplied by a number of its own."
                )
            for numbers in (self.inner, self.outer, self.shifts):
                numbers[:] = [tensor * factor for tensor in numbers]

    def _scale_by(self, factor: float) -> None:
        if self.bound is None:
            self.scale *= factor
            self.inner = _multiplied(self.inner, factor)
        else:
            self.bound *= factor
        self.outer = _multiplied(self.outer, factor)
        self.shifts = _multiplied(self.shifts, factor)
        self.fills = [(where, value * factor) for where, value in self.fills]
        if self.sink is not None:
            self.sink = self.sink * factor

    def _plus(self, step: Plus) -> None:
        numbers = self._arranged(step.numbers, step.axes)
        numbers = numbers if numbers.is_floating_point() else numbers.float()
        (added,) = _multiplied([numbers], step.factor)
        self._add(added)

    def _add(self, added: Tensor) -> None:
        if added.shape[-1] == 1:
            # The softmax does not change if a constant is added to a row.
            self.shifts.append(added)
        elif self.sink is not None:
            raise Unsupported("is taken of scores to which numbers were added beside a sink.")
        else:
            self.outer.append(added)

    def _fill(self, step: Fill) -> None:
        where = self._arranged(step.where, step.axes)
        if step.value > LOW:
            raise Unsupported(
                f"is taken of scores set to {step.value:g}, which does not mask them.\n"
                "    Set masked scores to -inf."
            )
        self.fills.append((where, step.value))

    def _tanh(self) -> None:
        if self.bound is not None or self.zeros or self.fills:
            raise Unsupported("is taken of scores that were bounded after masking or twice.")
        self.inner, self.outer, self.shifts = [*self.outer, *self.shifts], [], []
        self.bound = 1.0

    def _attend(self) -> AttentionMatrix:
        query, key = self._operand(of_rows=True), self._operand(of_rows=False)
        for factor in self.by_row:
            query = query * factor.to(query.dtype)
        for factor in self.by_key:
            key = key * factor.transpose(-1, -2).to(key.dtype)
        key = drop_repeated_heads(key)
        if query.ndim > 4 and key.shape[-3] == 1 < query.shape[-3]:
            sizes = tuple(query.shape[-4:-2])
            query, key = query.flatten(-4, -3), key.squeeze(-3)
            self._join_heads(sizes)
        mask, biases = self._masked(torch.Size((*query.shape[:-1], key.shape[-2])))
        sink = None if self.sink is None else _one_a_head(self.sink)
        scale, inner = self.scale, [*self.inner]
        if self.bound is not None:
            # A row whose scores are all lowered by a large constant gets uniform weights, also if
            # the constant is added before the softcap.
            inner += [numbers / self.bound for numbers in biases if _is_low_rows(numbers)]
            if self.bound <= 0 or not all(_is_low_rows(numbers) for numbers in biases):
                raise Unsupported(
                    "is taken of scores to which numbers were added after bounding them."
                )
            scale, biases = scale * self.bound, _multiplied(inner, self.bound)
        bias = _total(biases)
        return attend(
            query, key, scale=scale, bias=bias, mask=mask, softcap=self.bound, sink_bias=sink
        )

    def _operand(self, *, of_rows: bool) -> Tensor:
        """Return query or key, (batch..., tokens, head_dim), as a view if possible."""
        product, axes = self.product, self.layout.axes
        left = of_rows == self.layout.query_is_left
        tensor = product.left if left else product.right
        kept = [axis for axis in range(len(axes.sizes)) if axis != len(axes.sizes) - 2 + of_rows]
        sizes, places = ([of[axis] for axis in kept] for of in (axes.sizes, axes.places))
        for operand in (tensor, tensor.contiguous()):
            batch, tokens, depth = operand.stride()
            own = (batch, tokens, 0) if left else (batch, 0, tokens)
            basis = zip(product.sizes, product.places, own, strict=True)
            found = translated(basis, sizes, places, axes.start)
            if found is not None:
                offset = operand.storage_offset() + found[1]
                whole = (*sizes, operand.shape[-1])
                return operand.as_strided(whole, (*found[0], depth), offset)
        raise Unsupported("is taken of scores whose queries and keys are unknown.")

    def _join_heads(self, sizes: Numbers) -> None:
        """Merge two axes of heads, such as groups and the heads of each group."""
        for tensors in (self.inner, self.outer, self.zeros):
            tensors[:] = [_joined(tensor, sizes) for tensor in tensors]
        self.fills = [(_joined(where, sizes), value) for where, value in self.fills]
        self.sink = None if self.sink is None else _joined(self.sink, sizes)

    def _masked(self, shape: torch.Size) -> tuple[Mask | None, list[Tensor]]:
        """Return the mask, and the biases that remain after the mask is taken out."""
        where = [where for where, value in self.fills if value == -torch.inf]
        if len(where) == len(self.fills) == 1 and not (self.outer or self.zeros):
            return recognised(~where[0], shape), []
        lowered = [*self.outer]
        if self.fills:
            lowered.append(self._filled())
        self._check_zeros(lowered)
        parts = [(numbers, *split(numbers, shape)) for numbers in lowered]
        masking = [numbers for numbers, mask, _ in parts if mask is not None]
        if len(masking) > 1 and any(_is_finite(numbers) for numbers in masking):
            # One mask may hide all keys that another leaves. If one adds a finite number, the row
            # is not empty, so the sum of both is split instead.
            total = cast(Tensor, _total(masking))
            others = [part for part in parts if part[1] is None]
            parts = [*others, (total, *split(total, shape))]
        joined: Mask | None = None
        for mask in (mask for _, mask, _ in parts if mask is not None):
            joined = mask if joined is None else joined & mask
        return joined, [rest for _, _, rest in parts if rest is not None]

    def _filled(self) -> Tensor:
        """Return a bias that has the same effect as all fills."""
        numbers = torch.zeros((), device=self.product.left.device)
        for where, value in self.fills:
            numbers = torch.where(where, min(value, _FILLED), numbers)
        return numbers

    def _check_zeros(self, added: list[Tensor]) -> None:
        for zero in self.zeros:
            total = _total(added)
            if total is None or bool((zero & (total > LOW)).any()):
                raise Unsupported(
                    "is taken of scores that were set to 0 and not masked.\n"
                    "    Set masked scores to -inf."
                )


_FILLED = -1e30
"""A bias so low that adding a score to it changes nothing in float32."""


def _joined(tensor: Tensor, sizes: Numbers) -> Tensor:
    """Merge both axes of heads of a tensor; if both have size 1, so does the merged axis."""
    if tensor.shape[-4] * tensor.shape[-3] > 1:
        tensor = tensor.expand(*tensor.shape[:-4], *sizes, *tensor.shape[-2:])
    return tensor.flatten(-4, -3)


def _multiplied(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return tensors if factor == 1 else [tensor * factor for tensor in tensors]


def _total(tensors: list[Tensor]) -> Tensor | None:
    total = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    return total


def _is_finite(numbers: Tensor) -> bool:
    return bool(((numbers <= FAR) & (numbers > -torch.inf)).any())


def _is_low_rows(numbers: Tensor) -> bool:
    return numbers.shape[-1] == 1 and bool(((numbers == 0) | (numbers <= FAR)).all())


def _one_a_head(sink: Tensor) -> Tensor:
    """Return the sink's logits, (num_heads,) or (), from a column (..., num_heads, q_len, 1)."""
    first = sink[(0,) * (sink.ndim - 3)] if sink.ndim > 2 else sink
    each = first[..., :1, :1]
    if not torch.equal(each.expand(sink.shape), sink):
        raise Unsupported("counts a sink that is not one number for each head.")
    return each.flatten() if each.numel() > 1 else each.flatten()[0]
