"""Operations on the weights of a softmax: which leave them as they are, and which do not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes
from regard.capture.provenance import Track, Weights
from regard.capture.score_operations import one_number
from regard.masks import Keep
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.operations import ASSIGNMENTS, MULTIPLICATIONS, NO_NAN, QUOTIENTS
from regard.tracing.tracer import Operation

__all__ = [
    "after_dropout",
    "after_operation",
    "change_of",
    "is_mutable",
    "is_of_keys",
    "is_of_rows",
    "place_of",
    "sentence",
    "tensors_in",
    "without_rows",
    "written_by",
]


def after_dropout(weights: Weights) -> Weights:
    """Return weights after dropout; it is no part of a matrix."""
    return replace(weights, is_dropped=True, is_unscaled=False)


def after_operation(
    operation: Operation, source: Tensor, track: Track, weights: Weights, *, noisy: bool
) -> tuple[Weights, Axes | None] | None:
    """Return weights after an operation of the table, with their axes.

    Dropout may make some of them 0 and scale up the others. Whole rows may become 0, as of a head
    that is switched off. Rows without a key may become 0 instead of NaN.

    Args:
        operation: what has run.
        source: its argument that holds the weights.
        track: of that argument.
        weights: of that track.
        noisy: whether another argument holds random numbers.

    Returns:
        None if it has changed them.
    """
    output = cast(Tensor, operation.output)
    seen = track.seen_as(source)
    if seen is None:
        return None
    own = weights.attention
    if track.lies_in(output):
        axes = cast(Axes, track.axes)
        whole = axes.laid_over(output)
        dim = axes.along(own.place, own.length)
        if noisy or weights.is_unscaled:
            return _after_chance_in_place(operation, weights, axes, noisy=noisy)
        if dim is None or not _keeps_in_place(operation, whole, dim):
            return None
        rows = (whole == 0).all(dim, keepdim=True)
        return _with_empty_rows(weights, rows, axes), axes
    axes = seen.moved(output)
    dim = None if axes is None else axes.along(own.place, own.length)
    if axes is None or dim is None:
        return None
    before = source.to(output.dtype).reshape(output.shape)
    rounding = 2 * torch.finfo(output.dtype).eps
    same = torch.isclose(output, before, rtol=rounding, atol=0, equal_nan=True)
    same |= before.isnan() & (output == 0)
    if noisy and _is_thinned(before, output):
        unscaled = bool((output <= 1.01 * before).all())
        return replace(weights, is_dropped=True, is_unscaled=unscaled), axes
    if not bool(same.all()):
        if weights.is_unscaled and _is_scaled_up(operation, before, output):
            return replace(weights, is_unscaled=False), axes
        same |= (output == 0).all(dim, keepdim=True)
        if not bool(same.all()):
            return None
    rows = (output == 0).all(dim, keepdim=True) & (before > 0).any(dim, keepdim=True)
    return _with_empty_rows(weights, rows, axes), axes


def _with_empty_rows(weights: Weights, rows: Tensor, axes: Axes) -> Weights:
    """Return weights that know which of their rows were made 0."""
    if weights.is_dropped or not bool(rows.any()):
        return weights
    meeting = weights.attention.meeting
    found = None if meeting is None else meeting.rows(rows, axes)
    if found is None:
        reason = f"rows of the weights were set to 0 after their softmax ({weights.attention.line})"
        return replace(weights, changed=f"{reason}, and they are not all of its rows.")
    if weights.emptied is not None:
        found |= weights.emptied
    return replace(weights, emptied=found)


def _after_chance_in_place(
    operation: Operation, weights: Weights, axes: Axes, *, noisy: bool
) -> tuple[Weights, Axes] | None:
    """Return weights after dropout in place, whose factor is compared when they meet the value."""
    func, args = operation.func, operation.args
    if noisy:
        fills = func in ASSIGNMENTS and one_number(args[ASSIGNMENTS[func]]) == 0
        thinned = replace(weights, is_dropped=True, is_unscaled=True)
        return (thinned, axes) if fills or func in MULTIPLICATIONS else None
    factor = one_number(args[1]) if func in (*MULTIPLICATIONS, *QUOTIENTS) else None
    if not factor or (factor < 1) != (func in QUOTIENTS):
        return None
    return replace(weights, is_unscaled=False), axes


def _keeps_in_place(operation: Operation, whole: Tensor, dim: int) -> bool:
    """Return True if an operation in place has left weights whose rows sum to 1 or are 0."""
    func, args = operation.func, operation.args
    if func in ASSIGNMENTS and one_number(args[ASSIGNMENTS[func]]) != 0:
        return False
    if func not in (*ASSIGNMENTS, *MULTIPLICATIONS, *QUOTIENTS, *NO_NAN):
        return False
    near = 1e-4 if whole.dtype.itemsize > 2 else 0.05
    sums = whole.sum(dim, dtype=whole.dtype if whole.dtype.itemsize > 2 else torch.float32)
    return bool(((sums == 0) | sums.isnan() | ((sums - 1).abs() <= near)).all())


def _is_thinned(before: Tensor, output: Tensor) -> bool:
    """Return True if some numbers became 0 and one factor of at least 1 has scaled the others."""
    kept = (output != 0) & (before != 0)
    factors = (output / before)[kept]
    largest = factors.max() if factors.numel() else factors.new_ones(())
    return bool((largest > 0.99) & (factors > 0.99 * largest).all())


def _is_scaled_up(operation: Operation, before: Tensor, output: Tensor) -> bool:
    """Return True if one number has scaled up what dropout left."""
    if operation.func not in (*MULTIPLICATIONS, *QUOTIENTS):
        return False
    return torch.equal(before != 0, output != 0) and _is_thinned(before, output)


def without_rows(matrix: AttentionMatrix, emptied: Tensor | None) -> AttentionMatrix:
    """Return the same attention with rows hidden from all keys.

    Args:
        matrix: (..., num_heads, q_len, kv_len).
        emptied: True for the rows to hide, (..., num_heads, q_len, 1); None: none.

    Example:
        >>> import torch, regard
        >>> from regard.capture.weight_operations import without_rows
        >>> A = regard.attend(torch.zeros(3, 1), torch.zeros(2, 1))
        >>> without_rows(A, torch.tensor([[False], [True], [False]])).sum(-1)
        tensor([1., 0., 1.])
    """
    if emptied is None or not bool((emptied & (matrix.logsumexp() > -torch.inf)[..., None]).any()):
        return matrix
    rows = ~emptied
    for axis in range(rows.ndim):
        first = rows.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(rows), rows):
            rows = first
    keep = Keep(rows.clone(memory_format=torch.contiguous_format))
    mask = keep if matrix.mask is None else matrix.mask & keep
    return AttentionMatrix(matrix.source, mask.bind(matrix.shape, matrix.device))


def change_of(operation: Operation, line: str) -> str:
    """Return the sentence that says what an operation did to weights, and what helps.

    Args:
        operation: what has run.
        line: of their softmax.
    """
    return sentence(operation, line, str(operation.func).split(".")[1].rstrip("_"))


def sentence(operation: Operation, line: str, kind: str) -> str:
    """Return the sentence for one kind of change: the name of an operation, or ``relaid``."""
    did, remedy = _CHANGES.get(kind, _MIXED)
    return (
        f"{place_of(operation)} {did} after their softmax ({line}); "
        f"what meets the value is no softmax of the scores.\n    {remedy}"
    )


def is_of_keys(operation: Operation, track: Track, source: Tensor, output: Tensor) -> bool:
    """Return True if weights were made one number over all keys, as their sum or maximum is."""
    if output.numel() == 1:
        return source.numel() > 1
    own, seen = cast(Weights, track.stage).attention, track.seen_as(source)
    if seen is None:
        last = source.ndim - 1
        keys = {last} if source.ndim and source.shape[last] == own.length else set[int]()
    elif own.length == 1:
        axis = seen.along(own.place, 1)
        keys = {source.ndim - 1 if axis is None else axis}
    else:
        reach = range(own.place, own.place * own.length)
        sides = enumerate(zip(seen.sizes, seen.places, strict=True))
        keys = {axis for axis, (size, place) in sides if size > 1 and place in reach}
    return bool(keys) and _axes_made_one(operation, source, output).issuperset(keys)


def is_of_rows(
    operation: Operation, product: Product, track: Track, source: Tensor, output: Tensor
) -> bool:
    """Return True if scores were made one number a row or a column, as their maximum is."""
    seen = track.seen_as(source)
    gone = _axes_made_one(operation, source, output)
    if seen is None or not gone:
        return False
    sides = [
        {axis for axis, place in enumerate(seen.places) if seen.sizes[axis] > 1 and place in reach}
        for reach in (range(1, product.row), range(product.row, product.unit))
    ]
    return any(side and gone.issuperset(side) for side in sides)


def _axes_made_one(operation: Operation, source: Tensor, output: Tensor) -> set[int]:
    """Return the axes that an operation has made one number; none if it is no such operation."""
    dims = operation.kwargs.get("dim")
    if dims is None and isinstance(operation.func, OpOverload):
        arguments = operation.func._schema.arguments  # pyright: ignore[reportPrivateUsage]
        pairs = zip(arguments, operation.args, strict=False)
        dims = next((given for argument, given in pairs if argument.name == "dim"), None)
    given = cast("Sequence[object]", dims) if isinstance(dims, list | tuple) else (dims,)
    axes = {dim % source.ndim for dim in given if isinstance(dim, int)}
    if output.ndim == source.ndim:
        return {axis for axis in axes if output.shape[axis] == 1}
    return axes if output.ndim == source.ndim - len(axes) else set()


def is_mutable(operation: Operation) -> bool:
    """Return True if an operation changes numbers in place, not only how they are seen."""
    func = operation.func
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    return func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def written_by(operation: Operation) -> Iterator[Tensor]:
    """Yield the tensors whose numbers an operation has changed in place."""
    if not is_mutable(operation):
        return
    arguments = cast(OpOverload, operation.func)._schema.arguments  # pyright: ignore[reportPrivateUsage]
    for place, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = operation.args[place] if place < len(operation.args) else None
        yield from tensors_in((operation.kwargs.get(argument.name, given),))


def place_of(operation: Operation) -> str:
    """Return the operation by its name, with its line."""
    return f"{str(operation.func).split('.')[1]} ({operation.place()})"


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, those in lists included."""
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
_ADDED = (
    "adds to the weights",
    "Multiply each summand with the value on its own, and add the outputs.",
)
_CHANGES = {
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide", "where"), _MASKED),
    **dict.fromkeys(("masked_fill", "fill", "zero", "copy", "tril", "triu"), _MASKED),
    **dict.fromkeys(("index_put", "index_fill", "masked_scatter", "threshold"), _MASKED),
    **dict.fromkeys(
        ("cat", "concat", "stack", "vstack", "hstack", "pad", "constant_pad_nd"), _JOINED
    ),
    **dict.fromkeys(("index", "index_select", "flip", "roll", "repeat"), _REORDERED),
    **dict.fromkeys(("add", "sub", "subtract"), _ADDED),
    "relaid": _RELAID,
}
