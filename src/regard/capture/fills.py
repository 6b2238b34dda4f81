"""Numbers that are put at some places of a tensor, by index, by mask or into a view: which places.

The same is done to a tensor of bools, of the same layout, and that is where.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.capture.element_axes import Axes

__all__ = ["ASSIGNMENTS", "assigned", "marked"]

aten = torch.ops.aten


def marked(operation: Callable[..., Any], args: tuple[Any, ...], shape: torch.Size) -> Tensor:
    """Where an operation of ``ASSIGNMENTS`` puts its value in a tensor of that shape.

    Args:
        operation: the operation.
        args: of it; the first is the tensor.
        shape: of the tensor.

    Example:
        >>> import torch
        >>> from regard.capture.fills import marked
        >>> args = (torch.zeros(2, 3), 1, torch.tensor([0, 2]), -1.0)
        >>> marked(torch.ops.aten.index_fill_.int_Scalar, args, torch.Size((2, 3)))
        tensor([[ True, False,  True],
                [ True, False,  True]])
    """
    where = torch.zeros(shape, dtype=torch.bool, device=args[0].device)
    _mark(where, operation, args)
    return where


def assigned(operation: Callable[..., Any], args: tuple[Any, ...], axes: Axes) -> Tensor:
    """Where an operation in place on a view puts its value, seen by the whole tensor.

    Args:
        operation: the operation.
        args: of it; the first is a view of the tensor's storage.
        axes: of the whole tensor.

    Example:
        >>> import torch
        >>> from regard.capture.element_axes import Axes
        >>> whole = torch.zeros(2, 3)
        >>> args = (whole[:, 1:], float("-inf"))
        >>> assigned(torch.ops.aten.fill_.Scalar, args, Axes.of(whole, (3, 1)))
        tensor([[False,  True,  True],
                [False,  True,  True]])
    """
    view: Tensor = args[0]
    length = view.untyped_storage().nbytes() // view.element_size()
    where = torch.zeros(length, dtype=torch.bool, device=view.device)
    part = where.as_strided(view.shape, view.stride(), view.storage_offset())
    _mark(part, operation, args)
    return where.as_strided(axes.sizes, axes.strides, axes.offset)


def _mark(where: Tensor, operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
    name = str(operation).split(".")[1].rstrip("_")
    true = torch.tensor(True, device=where.device)
    match name:
        case "masked_fill":
            where.masked_fill_(args[1], True)
        case "index_put":
            aten.index_put_.default(where, args[1], true)
        case "index_fill":
            where.index_fill_(args[1], args[2], True)
        case "scatter":
            where.scatter_(args[1], args[2], True)
        case _:
            where.fill_(True)


ASSIGNMENTS: Mapping[Callable[..., Any], int] = {
    **dict.fromkeys((aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default), 1),
    **dict.fromkeys((aten.fill.Scalar, aten.fill.Tensor), 1),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill_.Scalar), 2),
    **dict.fromkeys((aten.masked_fill.Tensor, aten.masked_fill_.Tensor), 2),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), 2),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar), 3),
    **dict.fromkeys((aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor), 3),
    **dict.fromkeys((aten.scatter.value, aten.scatter_.value), 3),
    **dict.fromkeys((aten.scatter.src, aten.scatter_.src), 3),
}
"""The operations that put numbers somewhere, and the place of the numbers in their arguments."""
