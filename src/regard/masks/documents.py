"""The mask of several documents that are packed into one sequence: Documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, final

import torch
from torch import Tensor

from regard.errors import shape_text
from regard.masks.lengths import per_sequence, whole_numbers
from regard.masks.mask import NO_KEYS, KeyBounds, Mask, Points, PositionLimits
from regard.scores.box import broadcast_index, length


@final
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Documents(Mask):
    """A mask that lets a query attend to the keys of its own document.

    Use this mask if several texts are packed into one sequence. If q_len and kv_len differ, the
    last query is aligned with the last key, as in ``Causal()``. A query before the first key
    belongs to no document. Time is quadratic in the length of each document if its keys are
    contiguous. Documents in several spans give the same result but take longer.

    Args:
        ids: the document id of each key, whole numbers in any order: (kv_len,), or (batch, kv_len)
            with one row for every entry of the matrix's first axis. The first axis is the batch of
            (batch, num_heads, q_len, kv_len), and the heads of (num_heads, q_len, kv_len).

    Raises:
        TypeError: ids are not whole numbers.
        ValueError: the shape of ids does not fit the matrix.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x, mask=regard.Documents([0, 0, 1, 1]) & regard.Causal()).to_dense()
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """

    thread_safe = True

    ids: Tensor

    def __init__(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        needed = "the document of each key.\n    For example Documents([0, 0, 0, 1, 1])."
        object.__setattr__(self, "ids", whole_numbers("ids", ids, needed))

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        remark = "the document of each key.\n    Each query has the document of its aligned key."
        ids = per_sequence("ids", self.ids, (shape[-1],), shape, device, remark)
        return Documents(ids.to(device).clone())  # later changes do not reach a copy

    def allows(self, points: Points) -> Tensor:
        position = points.position
        at_query = (*points.places[:-2], position.clamp(min=0))
        of_query = broadcast_index(self.ids.squeeze(-2), at_query)
        same = of_query == points.read(self.ids)  # (..., rows, 1) and (..., 1, columns)
        return same if points.shape[-1] >= points.shape[-2] else same & (position >= 0)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        shift = shape[-1] - shape[-2]
        start, stop = rows.start + shift, rows.stop + shift
        if stop <= 0:
            return KeyBounds(NO_KEYS, NO_KEYS)
        reach = broadcast_index(self._on_cpu, leading)[..., max(start, 0) : stop, :]
        ends = cast(list[int], reach.flatten(0, -2).amin(0).tolist())
        first, last, span_first, span_stop = ends
        every = slice(-span_first, span_stop) if start >= 0 else NO_KEYS
        return KeyBounds(slice(first, -last), every if length(every) > 0 else NO_KEYS)

    def limits(self, shape: torch.Size) -> PositionLimits:
        return PositionLimits(documents=self, q_len=shape[-2])

    def rows(self, rows: range, q_len: int) -> Mask:
        return self if rows.stop == q_len else super().rows(rows, q_len)

    @cached_property
    def reach(self) -> Tensor:
        """The bounds of each key's document and contiguous span: four numbers, (..., kv_len, 4).

        With exclusive stops, they are the first key of the key's document, the negated stop of
        that document, the negated start of the contiguous span that contains the key, and the
        stop of that span. The minimum of each number over several keys gives two ranges: the
        smallest one that contains the documents of these keys, and the overlap of their spans.
        """
        ids = self.ids.squeeze(-2)
        order = ids.sort(dim=-1, stable=True).indices
        unsorted = order.sort(dim=-1).indices
        in_order = _runs(ids.gather(-1, order))
        first, last = (order.gather(-1, end).gather(-1, unsorted) for end in in_order)
        run_first, run_last = _runs(ids)
        return torch.stack((first, -1 - last, -run_first, run_last + 1), -1)

    @cached_property
    def _on_cpu(self) -> Tensor:
        """A copy of ``reach`` on the CPU, made once and not for every block."""
        return self.reach.cpu()

    @property
    def text(self) -> str:
        ids = self.ids.flatten(0, -2) if self.ids.ndim > 1 else self.ids
        ids = ids[0] if ids.shape[:-1] == (1,) else ids
        few = ids.numel() <= 16
        return f"Documents({ids.tolist() if few else f'ids of shape {shape_text(ids.shape)}'})"


def _runs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each value, the first and last position of the run of equal values it is in."""
    places = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    differ = values[..., 1:] != values[..., :-1]
    edge = torch.ones_like(values[..., :1], dtype=torch.bool)
    first = torch.where(torch.cat((edge, differ), -1), places, 0).cummax(-1).values
    from_the_end = torch.where(torch.cat((differ, edge), -1), places, values.shape[-1])
    return first, from_the_end.flip(-1).cummin(-1).values.flip(-1)
