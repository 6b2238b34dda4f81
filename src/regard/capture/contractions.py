"""Products of two tensors, computed by any of matmul, bmm, baddbmm, linear and einsum."""

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.element_axes import Numbers, contiguous
from regard.tracing.operations import ADDED_PRODUCTS

__all__ = [
    "Contraction",
    "Product",
    "Written",
    "contraction",
    "einsum_labels",
    "matmul_labels",
    "written",
]


@dataclass(eq=False, slots=True)
class Product:
    """A product of two tensors over the axis that they share.

    Attributes:
        left: (batch..., rows..., depth).
        right: (batch..., columns..., depth).
        batch: the sizes of the axes that both tensors have.
        rows: the sizes of the axes that only the left tensor has.
        columns: the sizes of the axes that only the right tensor has.
        modules: the names of the modules that were running when the product was computed.
    """

    left: Tensor
    right: Tensor
    batch: Numbers
    rows: Numbers
    columns: Numbers
    modules: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def sizes(self) -> Numbers:
        """Return the sizes of all axes: batch, rows, columns."""
        return self.batch + self.rows + self.columns

    @property
    def places(self) -> Numbers:
        """Return the strides of the contiguous product, one for each axis."""
        return contiguous(self.sizes)

    @property
    def is_of_vectors(self) -> bool:
        """Return True if the last axis of both factors is contiguous, as in ``query @ key.mT``.

        In ``weights @ value``, the contiguous axis of the right factor is its columns instead.
        """
        return self.left.stride(-1) == 1 == self.right.stride(-1)

    @property
    def row(self) -> int:
        """Return the stride of a row, which is the number of columns."""
        return math.prod(self.columns)

    @property
    def unit(self) -> int:
        """Return the stride of a batch entry, which is rows times columns."""
        return self.row * math.prod(self.rows)


@dataclass(frozen=True, slots=True)
class Contraction:
    """Letters for the axes of two tensors and of their product, as in an einsum equation."""

    left: str
    right: str
    output: str

    @property
    def summed(self) -> str:
        """Return the letters that both factors have and the product lacks."""
        return "".join(a for a in self.left if a in self.right and a not in self.output)


def matmul_labels(left: int, right: int) -> Contraction:
    """Return the letters of ``matmul`` for two tensors, given their numbers of axes.

    Example:
        >>> matmul_labels(4, 4)
        Contraction(left='abxz', right='abzy', output='abxy')
    """
    batch = string.ascii_lowercase[: max(left, right, 2) - 2]
    rows, columns = "x" if left > 1 else "", "y" if right > 1 else ""
    of_left = batch[len(batch) - max(left - 2, 0) :]
    of_right = batch[len(batch) - max(right - 2, 0) :]
    return Contraction(f"{of_left}{rows}z", f"{of_right}z{columns}", batch + rows + columns)


def einsum_labels(equation: str, left: int, right: int) -> Contraction | None:
    """Return the letters of an einsum of two tensors, given their numbers of axes.

    The result is None if the equation has no arrow or not exactly two factors.

    Example:
        >>> einsum_labels("... q d, ... k d -> ... q k", 4, 4)
        Contraction(left='ABqd', right='ABkd', output='ABqk')
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != 2 or "->" not in equation:
        return None
    hidden = [
        n - len(part.replace("...", "")) for n, part in zip((left, right), parts, strict=True)
    ]
    letters = [c for c in string.ascii_uppercase if c not in inputs][: max(*hidden, 0)]
    dots = ["".join(letters[len(letters) - n :]) if n else "" for n in (*hidden, len(letters))]
    texts = [t.replace("...", d) for t, d in zip((*parts, output), dots, strict=True)]
    return Contraction(texts[0], texts[1], texts[2])


def contraction(left: Tensor, right: Tensor, labels: Contraction) -> tuple[Product, Numbers] | None:
    """Return the product and the stride in it of each output axis; None if the labels do not fit.

    The labels fit if an axis is summed, no letter is repeated in one tensor, and every other letter
    is kept. An axis of size 1 in one tensor is expanded to the size in the other.
    """
    both = [a for a in labels.output if a in labels.left and a in labels.right]
    rows = [a for a in labels.output if a not in labels.right]
    columns = [a for a in labels.output if a not in labels.left]
    summed, kept = labels.summed, {*labels.output, *labels.summed}
    doubled = any(len({*text}) < len(text) for text in (labels.left, labels.right, labels.output))
    if not summed or doubled or not kept >= {*labels.left, *labels.right}:
        return None
    sizes = dict(zip(labels.left, left.shape, strict=True))
    for axis, size in zip(labels.right, right.shape, strict=True):
        sizes[axis] = max(size, sizes.get(axis, 1))
    of_left, of_right = ((*both, *rows, *summed), (*both, *columns, *summed))
    product = Product(
        _ordered(left, labels.left, of_left, sizes).flatten(-len(summed)),
        _ordered(right, labels.right, of_right, sizes).flatten(-len(summed)),
        batch=tuple(sizes[a] for a in both),
        rows=tuple(sizes[a] for a in rows),
        columns=tuple(sizes[a] for a in columns),
    )
    places = dict(zip((*both, *rows, *columns), product.places, strict=True))
    return product, tuple(places[a] for a in labels.output)


def _ordered(tensor: Tensor, labels: str, order: tuple[str, ...], sizes: dict[str, int]) -> Tensor:
    view = tensor.permute([labels.index(axis) for axis in order])
    return view.expand([sizes[axis] for axis in order])


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Written:
    """A product as an operation computed it: alpha · left·right + beta · added.

    Attributes:
        left: the first factor.
        right: the second factor.
        labels: the letters of the axes of both factors and of the product.
        added: the tensor that is added to the product; None without one.
        beta: the factor of ``added``.
        alpha: the factor of the product.
    """

    left: Tensor
    right: Tensor
    labels: Contraction
    added: Tensor | None = None
    beta: float = 0.0
    alpha: float = 1.0

    def seen_from(self, factor: Tensor) -> tuple[str, Tensor, str]:
        """Return the letters of ``factor``, then the other factor and its letters."""
        if factor is self.left:
            return self.labels.left, self.right, self.labels.right
        return self.labels.right, self.left, self.labels.left


def written(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Written | None:
    """Return the product that an operation computed; None if it has not exactly two factors.

    Args:
        func: the operation, one of ``PRODUCTS``.
        args: the operation's positional arguments.
        kwargs: the operation's keyword arguments.
    """
    if func is aten.einsum.default:
        factors = cast(list[Tensor], args[1])
        if len(factors) != 2:
            return None
        left, right = factors
        labels = einsum_labels(args[0], left.ndim, right.ndim)
        return None if labels is None else Written(left, right, labels)
    if func in ADDED_PRODUCTS:
        added, left, right = args[:3]
        beta, alpha = (float(kwargs.get(name, 1)) for name in ("beta", "alpha"))
        return Written(left, right, matmul_labels(left.ndim, right.ndim), added, beta, alpha)
    left, right = args[:2]
    labels = matmul_labels(left.ndim, right.ndim)
    if func is aten.linear.default:
        labels = replace(labels, right=labels.right[::-1])
        added = args[2] if len(args) > 2 else None
        return Written(left, right, labels, added, beta=1.0)
    return Written(left, right, labels)
