"""The mask of packed documents: Documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from regard.errors import dtype_text, kind_text, shape_text
from regard.masks.key_bounds import KeyBounds
from regard.masks.lengths import fits
from regard.masks.mask import Mask, PointMask, pick
from regard.scores.box import Box, broadcast_index

__all__ = ["Documents"]


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Documents(Mask):
    """A query attends to the keys of its own document: several texts packed into one sequence.

    Where q_len and kv_len differ, the last query sits at the last key, as in ``Causal()``; a query
    before the first key belongs to no document. Documents that are each in one piece cost their
    squares; others are as exact.

    Args:
        ids: the document of each key, whole numbers in any order: (kv_len,), or (batch, kv_len)
            with one row for every entry of the first axis.

    Raises:
        TypeError: ids are not whole numbers.
        ValueError: not one for each key.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x, mask=regard.Documents([0, 0, 1, 1]) & regard.Causal()).to_dense()
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """

    ids: Tensor

    def __init__(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        try:
            tensor = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError):
            raise _not_ids(kind_text(ids)) from None
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise _not_ids(dtype_text(tensor.dtype))
        object.__setattr__(self, "ids", tensor)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        batch, keys = shape[:-2][:1], shape[-1]
        ids = self.ids.to(device)
        if not fits(ids, (*shape[:-2], 1, keys)) or ids.shape[-1] != keys:
            if ids.shape not in ((keys,), (*batch, keys)):
                rows = f" or {shape_text((*batch, keys))}" if batch else ""
                raise ValueError(
                    f"ids has shape {shape_text(ids.shape)}; a matrix of shape "
                    f"{shape_text(shape)} needs {shape_text((keys,))}{rows}, "
                    "the document of each key.\n    A query takes that of the key it sits at."
                )
            ids = ids.reshape(*ids.shape[:-1] or (1,), *(1,) * (len(shape) - 2), keys)
        return Documents(ids.clone())  # what is known of them must stay true

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Documents(function(self.ids))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        shift = shape[-1] - shape[-2]
        start, stop = rows.start + shift, rows.stop + shift
        if stop <= 0:
            return KeyBounds(slice(0, 0), slice(0, 0))
        reach = broadcast_index(self._read, leading)[..., max(start, 0) : stop, :]
        ends = cast(list[int], reach.flatten(0, -2).amin(0).tolist())
        first, last, run_first, run_last = ends
        every = slice(-run_first, run_last) if start >= 0 else slice(0, 0)
        return KeyBounds(slice(first, -last), every if every.start < every.stop else slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        ids = broadcast_index(self.ids, box.leading)  # (..., 1, kv_len)
        shift = shape[-1] - shape[-2]
        positions = torch.arange(box.rows.start, box.rows.stop, device=device) + shift
        of_queries = ids.mT.index_select(-2, positions.clamp(min=0))
        allowed = of_queries == ids[..., box.columns]
        return allowed if shift >= 0 else allowed & (positions >= 0)[:, None]

    def mask_mod(self, shape: torch.Size) -> PointMask:
        ids, shift = self.ids[..., 0, :], shape[-1] - shape[-2]

        def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            position = q_idx + shift
            of_query = pick(ids, b, h, position.clamp(min=0))
            return (of_query == pick(ids, b, h, kv_idx)) & (position >= 0)

        return same

    @cached_property
    def reach(self) -> Tensor:
        """How far the document of each key reaches, (..., kv_len, 4), such that minima are hulls.

        Its first key, minus one past its last; and, of the keys in one piece around this one,
        minus the first, one past the last.
        """
        ids = self.ids.squeeze(-2)
        order = ids.sort(dim=-1, stable=True).indices
        unsorted = order.sort(dim=-1).indices
        in_order = _runs(ids.gather(-1, order))
        first, last = (order.gather(-1, end).gather(-1, unsorted) for end in in_order)
        run_first, run_last = _runs(ids)
        return torch.stack((first, -1 - last, -run_first, run_last + 1), -1)

    @cached_property
    def _read(self) -> Tensor:
        """The same on the CPU: a device is waited for once, not for every block."""
        return self.reach.cpu()

    @property
    def text(self) -> str:
        ids = self.ids.flatten(0, -2) if self.ids.ndim > 1 else self.ids
        ids = ids[0] if ids.shape[:-1] == (1,) else ids
        few = ids.numel() <= 16
        return f"Documents({ids.tolist() if few else f'ids of shape {shape_text(ids.shape)}'})"


def _runs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the first and the last of the equal neighbours of each value."""
    places = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    differ = values[..., 1:] != values[..., :-1]
    edge = torch.ones_like(values[..., :1], dtype=torch.bool)
    first = torch.where(torch.cat((edge, differ), -1), places, 0).cummax(-1).values
    from_the_end = torch.where(torch.cat((differ, edge), -1), places, values.shape[-1])
    return first, from_the_end.flip(-1).cummin(-1).values.flip(-1)


def _not_ids(came: str) -> TypeError:
    return TypeError(
        f"ids is {came}; it must be whole numbers, the document of each key.\n"
        "    For example Documents([0, 0, 0, 1, 1])."
    )
