"""Operands of the kernels, from the scores and the mask of a matrix, and what is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import And, Causal, Documents, Keep, Mask, Padding, RowSlice, SlidingWindow
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

__all__ = ["Limits", "Operands", "Plane", "operands", "refused"]

AXES = 4  # batch, num_heads, tokens, head_dim
# With a smaller scale, the unscaled products could overflow float32, or the scale underflow.
LEAST_SCALE = 2.0**-60


class Plane(NamedTuple):
    """Numbers for each element of the matrix.

    Attributes:
        numbers: (batch, num_heads, q_len, kv_len). If they are constant along diagonals,
            (batch, num_heads, q_len + kv_len), indexed by q_len - 1 - q_idx + kv_idx.
        diagonal: True if the numbers are constant along diagonals.
    """

    numbers: Tensor
    diagonal: bool


@dataclass(frozen=True, eq=False)
class Limits:
    """The mask of the kernels: a key is visible if every limit that is not None allows it.

    Attributes:
        low: the lowest kv_idx - q_idx.
        high: the highest.
        lengths: how many keys each sequence has, (batch, num_heads).
        first: the first key of the document of each key, (batch, num_heads, kv_len).
        stop: one past the last key of that document, of the same shape.
        shift: the position of the first query on the axis of the keys.
        keep: True = may attend, (batch, num_heads, q_len, kv_len).
    """

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None
    first: Tensor | None = None
    stop: Tensor | None = None
    shift: int = 0
    keep: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Operands:
    """softcap(scale · query · key + bias), masked, with four axes; heads may be grouped.

    Attributes:
        query: (batch, num_heads, q_len, head_dim); the last stride is 1.
        key: (batch, num_kv_heads, kv_len, head_dim); the last stride is 1.
        scale: more than 0.
        softcap: the scores stay between -softcap and softcap.
        bias: numbers added to the scaled scores.
        sink: a logit in the denominator, (batch, num_heads).
        limits: the mask.
    """

    query: Tensor
    key: Tensor
    scale: float
    softcap: float | None
    bias: Plane | None
    sink: Tensor | None
    limits: Limits

    @property
    def shape(self) -> torch.Size:
        """(batch, num_heads, q_len, kv_len)."""
        return torch.Size((*self.query.shape[:-1], self.key.shape[-2]))

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]


class _Leaf(NamedTuple):
    """A mask that is no combination, and the rows it is applied to, within a taller matrix."""

    mask: Mask
    start: int
    q_len: int


def _leaves(mask: Mask | None, start: int, q_len: int) -> Iterator[_Leaf]:
    """Yield the masks that must all allow a key."""
    match mask:
        case None:
            return
        case And(first, second):
            yield from _leaves(first, start, q_len)
            yield from _leaves(second, start, q_len)
        case RowSlice(inner, more, whole):
            yield from _leaves(inner, start + more, whole)
        case _:
            yield _Leaf(mask, start, q_len)


def refused(source: Scores, mask: Mask | None) -> str | None:
    """Return why no kernel can compute these scores and this mask, as a clause, or None."""
    if not isinstance(source, QueryKeyScores):
        return "Triton kernels start from query and key, not from scores"
    if source.score_mod is not None:
        return "no Triton kernel has a score_mod"
    if len(source.shape) > AXES:
        return f"Triton kernels have one batch axis, and the matrix has {len(source.shape) - 3}"
    leaves = list(_leaves(mask, 0, source.shape[-2]))
    known = (Causal, SlidingWindow, Padding, Documents, Keep)
    for kind in (Documents, Keep):
        if sum(isinstance(leaf.mask, kind) for leaf in leaves) > 1:
            return f"no Triton kernel joins several masks {kind.__name__}"
    for leaf in leaves:
        if not isinstance(leaf.mask, known):
            return f"no Triton kernel has the mask {leaf.mask.text}"
        if isinstance(leaf.mask, Keep) and leaf != (leaf.mask, 0, source.shape[-2]):
            return f"no Triton kernel has the mask {leaf.mask.text} of other rows"
        by_head = isinstance(leaf.mask, Padding | Documents) and _differs_by_head(leaf.mask)
        if by_head and source.group > 1:
            return "no Triton kernel has lengths or documents for each of the heads of a group"
    return None


def _differs_by_head(mask: Mask) -> bool:
    (tensor,) = mask.tensors
    return tensor.ndim > 2 and tensor.shape[-3] > 1


def operands(source: QueryKeyScores, mask: Mask | None) -> Operands:
    """Return the operands for scores and a mask that ``refused`` accepts."""
    query, key, scale = _four(source.query), _four(source.key), source.scale
    if scale < 0:
        query, scale = -query, -scale
    if scale < LEAST_SCALE:
        query, scale = query * scale, 1.0
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    sink = source.sink_bias
    return Operands(
        _packed(query),
        _packed(key),
        scale,
        source.softcap,
        _bias(source, shape),
        None if sink is None else _four(sink)[..., 0, 0].float().expand(shape[:2]).contiguous(),
        _limits(mask, source.shape, shape),
    )


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (AXES - tensor.ndim)]


def _packed(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bias(source: QueryKeyScores, shape: torch.Size) -> Plane | None:
    if source.bias is not None:
        return Plane(_four(source.bias).expand(shape), False)
    if source.position_bias is None:
        return None
    q_len, kv_len = shape[-2:]
    distance = torch.arange(1 - kv_len, q_len + 1, device=source.device)
    along = source.position_bias.along(distance, lambda tensor: tensor.float())
    flat = _four(along).squeeze(-2).float()
    return Plane(flat.expand(*shape[:2], q_len + kv_len).contiguous(), True)


def _reached(limit: int, shape: torch.Size) -> int:
    """Clamp a limit of kv_idx - q_idx to the matrix, because kernels add in int32."""
    return min(max(limit, -shape[-2]), shape[-1])


def _limits(mask: Mask | None, given: torch.Size, shape: torch.Size) -> Limits:
    lows: list[int] = []
    highs: list[int] = []
    lengths: list[Tensor] = []
    first = stop = keep = None
    shift = 0
    kv_len = shape[-1]
    for leaf, start, q_len in _leaves(mask, 0, shape[-2]):
        match leaf:
            case Causal() | SlidingWindow():
                low, high = leaf.limits(torch.Size((*given[:-2], q_len, kv_len)))
                lows += [] if low is None else [low + start]
                highs.append(high + start)
            case Padding():
                lengths.append(_four(leaf.lengths)[..., 0, 0])
            case Documents():
                reach = _four(leaf.reach.int())  # (batch or 1, num_heads or 1, kv_len, 4)
                first = reach[..., 0].contiguous().expand(*shape[:2], kv_len)
                stop = (-reach[..., 1]).expand(*shape[:2], kv_len)
                shift = kv_len - q_len + start
            case Keep():
                keep = _four(leaf.mask).expand(shape)
            case _:
                raise AssertionError(f"{leaf.text} is refused")
    return Limits(
        _reached(max(lows), shape) if lows else None,
        _reached(min(highs), shape) if highs else None,
        torch.stack([each.expand(shape[:2]) for each in lengths]).amin(0) if lengths else None,
        first,
        stop,
        shift,
        keep,
    )
