"""Operations that make other numbers of weights: which they are, in words, with what helps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes
from regard.capture.tensor_tracks import Track, Weights
from regard.tracing.tracer import Operation

__all__ = [
    "change_of",
    "has_no_keys",
    "is_mutable",
    "is_of_rows",
    "joined_words",
    "other_axis_words",
    "other_rows_words",
    "place_of",
    "relaid_words",
    "tensors_in",
]


def change_of(operation: Operation, line: str) -> str:
    """What an operation did to weights, and what helps: the reason why they cannot be kept.

    Args:
        operation: what has run.
        line: of their softmax.
    """
    name = str(operation.func).split(".")[1].rstrip("_")
    did, remedy = _CHANGES.get(name, _MIXED)
    return (
        f"{place_of(operation)} {did} after their softmax ({line}); "
        f"what meets the value is no softmax of the scores.\n    {remedy}"
    )


def relaid_words(operation: Operation, line: str, *, leaves_out: bool = False) -> str:
    """Why weights that meet the value in another order cannot be kept, with what helps.

    Args:
        operation: the product with the value.
        line: of their softmax.
        leaves_out: whether they meet it without some of their keys.
    """
    did, remedy = _SHORTENED if leaves_out else _RELAID
    return (
        f"{place_of(operation)} {did} after their softmax ({line}); "
        f"what meets the value is no softmax of the scores.\n    {remedy}"
    )


def other_axis_words(line: str) -> str:
    """Why weights whose sums over the keys are not 1 cannot be kept, with what helps.

    Args:
        line: of their softmax.
    """
    return (
        f"the softmax ({line}) runs over another axis than the one along which its "
        "weights meet the value; the weights of a query must sum to 1 over the keys.\n"
        "    Take the softmax over the axis of the keys, dim=-1."
    )


def other_rows_words(line: str) -> str:
    """Why weights that met one value as they were, and another with rows of 0, cannot be kept.

    Args:
        line: of their softmax.
    """
    return (
        f"the softmax ({line}) gives weights that are used twice, and rows of them were set to 0 "
        "for one of the two; a matrix has one of them.\n"
        "    Take the softmax twice, once for each."
    )


def has_no_keys(operation: Operation, track: Track, source: Tensor, output: Tensor) -> bool:
    """Whether weights were made one number over all keys, as their sum or maximum is.

    Args:
        operation: what has run.
        track: of the weights.
        source: the view of them that it was given.
        output: what it gave.
    """
    if output.numel() == 1:
        return source.numel() > 1
    keys = _axes_of_keys(track, source)
    gone = _axes_made_one(operation, source, output)
    return bool(keys) and gone.issuperset(keys)


def is_of_rows(
    operation: Operation, product: Product, axes: Axes | None, source: Tensor, output: Tensor
) -> bool:
    """Whether scores were made one number a row or a column, as their maximum is.

    Args:
        operation: what has run.
        product: of query and key.
        axes: of the scores in it; None where nobody knows.
        source: the view of them that it was given.
        output: what it gave.
    """
    seen = None if axes is None else axes.seen_as(source)
    gone = _axes_made_one(operation, source, output)
    if seen is None or not gone:
        return False
    sides = [
        {axis for axis, place in enumerate(seen.places) if seen.sizes[axis] > 1 and place in reach}
        for reach in (range(1, product.row), range(product.row, product.unit))
    ]
    return any(side and gone.issuperset(side) for side in sides)


def _axes_of_keys(track: Track, source: Tensor) -> set[int]:
    """The axes of a view of weights along which the keys lie: several where they were split."""
    weights = cast(Weights, track.stage)
    last = source.ndim - 1
    if track.axes is None:
        return {last} if source.ndim and source.shape[last] == weights.length else set()
    seen = track.axes.seen_as(source)
    if seen is None:
        return set()
    if weights.length == 1:
        axis = seen.along(weights.normal, 1)
        return {last if axis is None else axis}
    sides = enumerate(zip(seen.sizes, seen.places, strict=True))
    reach = range(weights.normal, weights.normal * weights.length)
    return {axis for axis, (size, place) in sides if size > 1 and place in reach}


def _axes_made_one(operation: Operation, source: Tensor, output: Tensor) -> set[int]:
    """The axes that an operation has made one number; none where it is no such operation."""
    dims = _argument(operation, "dim")
    given = cast("Sequence[object]", dims) if isinstance(dims, list | tuple) else (dims,)
    axes = {dim % source.ndim for dim in given if isinstance(dim, int)}
    if output.ndim == source.ndim:
        return {axis for axis in axes if output.shape[axis] == 1}
    return axes if output.ndim == source.ndim - len(axes) else set()


def _argument(operation: Operation, name: str) -> object:
    """An argument of an operation by its name; None where it has none."""
    if name in operation.kwargs or not isinstance(operation.func, OpOverload):
        return operation.kwargs.get(name)
    arguments = operation.func._schema.arguments  # pyright: ignore[reportPrivateUsage]
    pairs = zip(arguments, operation.args, strict=False)
    return next((given for argument, given in pairs if argument.name == name), None)


def is_mutable(operation: Operation) -> bool:
    """Whether an operation changes numbers in place, not only how they are seen."""
    func = operation.func
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    return func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def joined_words(through: str, line: str) -> str:
    """Why weights of several softmaxes that were put together cannot be kept, with what helps.

    Args:
        through: what put them together, with its line.
        line: of one of the softmaxes.
    """
    did, remedy = _JOINED
    return (
        f"{through} {did} after their softmax ({line}); "
        f"what meets the value is no softmax of the scores.\n    {remedy}"
    )


def place_of(operation: Operation) -> str:
    """The operation by its name, with its line."""
    return f"{str(operation.func).split('.')[1]} ({operation.place()})"


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists included."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(cast(Iterable[Any], argument))


_MASKED = ("changes the weights", "Mask the scores before the softmax, with -inf.")
_MIXED = (
    "makes others of the weights",
    "Multiply the weights that the softmax gave with the value.",
)
_JOINED = (
    "puts weights together",
    "Multiply each with its value, and put the outputs together.",
)
_REORDERED = (
    "reorders the weights",
    "Reorder query and key before their product, or the output after the value.",
)
_RELAID = ("takes the weights in another order, or some of them twice,", _REORDERED[1])
_SHORTENED = ("leaves out keys of the weights", _MASKED[1])
_ADDED = (
    "adds to the weights",
    "Multiply each summand with the value on its own, and add the outputs.",
)
_CHANGES = {
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide", "where"), _MASKED),
    **dict.fromkeys(("masked_fill", "fill", "zero", "copy", "tril", "triu"), _MASKED),
    **dict.fromkeys(("index_put", "index_fill", "masked_scatter", "threshold"), _MASKED),
    **dict.fromkeys(("cat", "concat", "stack"), _JOINED),
    **dict.fromkeys(("index", "index_select", "flip", "roll"), _REORDERED),
    **dict.fromkeys(("add", "sub", "subtract"), _ADDED),
}
