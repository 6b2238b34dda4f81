"""Operations that make other numbers of weights: which they are, in words, with what helps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from regard.capture.tracks import Track, Weights
from regard.tracing import Operation

__all__ = ["change_of", "has_no_keys", "place_of", "tensors_in"]


def change_of(operation: Operation, line: str) -> str:
    """What an operation did to weights, and what helps: the reason why they cannot be kept.

    Args:
        operation: what has run.
        line: of their softmax.
    """
    name = str(operation.func).split(".")[1].rstrip("_")
    did, remedy = _CHANGES.get(name, _MIXED if name in _MIXES else _MASKED)
    return (
        f"{place_of(operation)} {did} after their softmax ({line}); "
        f"what meets the value is no softmax of the scores.\n    {remedy}"
    )


def has_no_keys(operation: Operation, track: Track, source: Tensor, output: Tensor) -> bool:
    """Whether weights were made one number over the keys, as their sum or maximum is.

    Args:
        operation: what has run.
        track: of the weights.
        source: the view of them that it was given.
        output: what it gave.
    """
    weights = cast(Weights, track.stage)
    seen = None if track.axes is None else track.axes.seen_as(source)
    axis = source.ndim - 1
    if seen is not None:
        found = seen.along(weights.normal, weights.length)
        axis = axis if found is None else found
    if output.ndim == source.ndim:
        return output.shape[axis] == 1 < source.shape[axis]
    dims = cast(object, operation.args[1] if len(operation.args) > 1 else None)
    given = cast("Sequence[object]", dims) if isinstance(dims, list | tuple) else (dims,)
    # An operation that indexes has tensors there.
    axes = [dim % source.ndim for dim in given if isinstance(dim, int)]
    return output.ndim < source.ndim and (axis in axes or output.ndim == 0)


def place_of(operation: Operation) -> str:
    """The operation by its name, with the user's own line."""
    caller = operation.caller()
    return f"{str(operation.func).split('.')[1]} ({caller.file}:{caller.line})"


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
_ADDED = (
    "adds to the weights",
    "Multiply each summand with the value on its own, and add the outputs.",
)
_CHANGES = {
    **dict.fromkeys(("cat", "concat", "stack"), _JOINED),
    **dict.fromkeys(("index", "index_select", "flip", "roll"), _REORDERED),
    **dict.fromkeys(("add", "sub", "subtract"), _ADDED),
}
_MIXES = (
    *("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "convolution"),
    *("conv1d", "conv2d", "_softmax", "softmax", "mean", "amax", "amin", "max", "min", "sum"),
    *("topk", "sort", "gather", "scatter"),
)
