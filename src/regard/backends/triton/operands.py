"""Operands of the kernels, from the scores and the mask of a matrix, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.backends.triton.packed_mask import PackedMask, pack
from regard.masks import Mask
from regard.masks.mask import PositionLimits
from regard.scores.position_bias import Bias
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

AXES = 4  # batch, num_heads, tokens, head_dim
# With a smaller scale, the unscaled products could overflow float32, or the scale underflow.
LEAST_SCALE = 2.0**-60


class MatrixNumbers(NamedTuple):
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
        packed: the whole mask as bits; then no other limit is set.
    """

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None
    first: Tensor | None = None
    stop: Tensor | None = None
    shift: int = 0
    packed: PackedMask | None = None


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
    bias: MatrixNumbers | None
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


DivergenceKind = Literal["kullback_leibler", "second", "jensen_shannon"]


@dataclass(frozen=True, eq=False)
class OtherMatrix:
    """The other matrix of a divergence.

    Attributes:
        given: what the kernels compute its scores from.
        norms: of its rows, float32, (batch, num_heads, q_len) each: the maximum, and the log of the
            sum in bits.
        numbers: the derivative of a loss by the divergence of each row, of the same shape.
        kind: the divergence whose first matrix the differentiated one is; ``"second"``: it is the
            second one of a Kullback-Leibler divergence.
    """

    given: Operands
    norms: tuple[Tensor, Tensor]
    numbers: Tensor
    kind: DivergenceKind


class CellNumbers(NamedTuple):
    """A number for each cell of a grid over the matrix.

    Attributes:
        numbers: float32, (batch, num_heads, height, width), contiguous.
        spans: (start, stop) of its rows in queries, and of its columns in keys; int64, (spans, 2),
            on the CPU, disjoint and rising.
        places: int32, (q_len,) and (kv_len,): the row or the column of each token; -1 - n where it
            lies in none, with n the next one.
    """

    numbers: Tensor
    spans: tuple[Tensor, Tensor]
    places: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Derivative:
    """The derivative of a loss by the weights and the scores; float32, None: the term is 0.

    Attributes:
        offset: for each row, (batch, num_heads, q_len).
        slope: for each row, times the natural logarithm of a weight.
        columns: for each key, (batch, num_heads, kv_len).
        grid: for each cell.
        left: (batch, heads, q_len, width), heads may be grouped; the last stride is 1.
        right: (batch, num_heads, kv_len, width), of the same dtype; times ``left``.
        keys: int64, (batch, num_heads, q_len, count): keys of single scores; below 0: none.
        numbers: the derivatives by these scores; 0 where there is none.
        other: the other matrix of a divergence.
    """

    offset: Tensor
    slope: Tensor | None = None
    columns: Tensor | None = None
    grid: CellNumbers | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    keys: Tensor | None = None
    numbers: Tensor | None = None
    other: OtherMatrix | None = None


def refused(source: Scores) -> str | None:
    """Return why no kernel can compute these scores, as a clause, or None."""
    if not isinstance(source, QueryKeyScores):
        return "Triton kernels start from query and key, not from scores"
    if source.score_mod is not None:
        return "no Triton kernel has a score_mod"
    if len(source.shape) > AXES:
        return f"Triton kernels have one batch axis, and the matrix has {len(source.shape) - 3}"
    return None


def bytes_of_bits(source: Scores, mask: Mask | None) -> int:
    """Return the memory of a mask's bits where it cuts every square, the same in all heads."""
    *_, q_len, kv_len = source.shape
    limits = _position_limits(mask, source.shape, source.group)
    return q_len * kv_len // 8 if limits is None else 0


def _position_limits(mask: Mask | None, shape: torch.Size, group: int) -> PositionLimits | None:
    """Return limits by position that are the whole mask; None: it needs bits."""
    if mask is None:
        return PositionLimits()
    limits = mask.limits(shape)
    if limits is None or group == 1:
        return limits
    # One program reads the keys of all heads of a group.
    documents = None if limits.documents is None else limits.documents.ids
    by_head = any(
        each is not None and each.ndim > 2 and each.shape[-3] > 1
        for each in (limits.lengths, documents)
    )
    return None if by_head else limits


# The bits of a matrix's mask, evaluated on first use and freed with its scores. Another matrix
# evaluates its own, since what a mask_mod reads may have changed.
_PACKED: "WeakKeyDictionary[Scores, tuple[Mask, PackedMask]]" = WeakKeyDictionary()


def _packed_mask(source: QueryKeyScores, mask: Mask) -> PackedMask:
    if source not in _PACKED or _PACKED[source][0] is not mask:
        _PACKED[source] = mask, pack(mask, source.shape, source.device)
    return _PACKED[source][1]


def operands(
    source: QueryKeyScores, mask: Mask | None, kept: Mapping[str, Tensor] | None = None
) -> Operands:
    """Return the operands for scores that ``refused`` accepts, and a mask.

    Args:
        source: the scores.
        mask: the mask, bound to them.
        kept: may have the ``slots`` and ``words`` of the mask, which are not evaluated again then.
    """
    query, key, scale = _four(source.query), _four(source.key), source.scale
    if (factor := query_factor(source)) != 1:
        query, scale = query * factor, scale / factor if abs(factor) == 1 else 1.0
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    sink = source.sink_bias
    return Operands(
        _packed(query),
        _packed(key),
        scale,
        source.softcap,
        _bias(source, shape),
        None if sink is None else _four(sink)[..., 0, 0].float().expand(shape[:2]).contiguous(),
        _limits(source, mask, shape, kept or {}),
    )


def query_factor(source: QueryKeyScores) -> float:
    """Return the factor of the query that keeps the scale of the kernels above 0 and not tiny."""
    if abs(source.scale) < LEAST_SCALE:
        return source.scale
    return -1.0 if source.scale < 0 else 1.0


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (AXES - tensor.ndim)]


def _packed(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bias(source: QueryKeyScores, shape: torch.Size) -> MatrixNumbers | None:
    if source.bias is not None:
        return MatrixNumbers(_four(source.bias).expand(shape), False)
    if source.position_bias is None:
        return None
    flat = position_numbers(source, source.position_bias)
    return MatrixNumbers(flat.expand(*shape[:2], flat.shape[-1]).contiguous(), True)


def position_numbers(source: QueryKeyScores, bias: Bias) -> Tensor:
    """Return a position bias as the kernels read it, (batch or 1, num_heads or 1, q_len + kv_len).

    Autograd follows it to the tensors of the bias.
    """
    *_, q_len, kv_len = source.shape
    distance = source.rows_after + torch.arange(1 - kv_len, q_len + 1, device=source.device)
    return _four(bias.along(distance, lambda tensor: tensor.float())).squeeze(-2).float()


def _reached(limit: int, shape: torch.Size) -> int:
    """Clamp a limit of kv_idx - q_idx to the matrix, because kernels add in int32."""
    return min(max(limit, -shape[-2]), shape[-1])


def _limits(
    source: QueryKeyScores, mask: Mask | None, shape: torch.Size, kept: Mapping[str, Tensor]
) -> Limits:
    limits = _position_limits(mask, source.shape, source.group)
    if limits is None:
        assert mask is not None
        if "slots" in kept:
            packed = PackedMask(kept["slots"], kept["words"], (shape[-2], shape[-1]))
            return Limits(packed=packed)
        return Limits(packed=_packed_mask(source, mask))
    low, high, lengths, documents, start, q_len = limits
    found = Limits(
        None if low is None else _reached(low, shape),
        None if high is None else _reached(high, shape),
        None if lengths is None else _four(lengths)[..., 0, 0].expand(shape[:2]).contiguous(),
    )
    if documents is None:
        return found
    reach = _four(documents.reach.int())  # (batch or 1, num_heads or 1, kv_len, 4)
    return replace(
        found,
        first=reach[..., 0].contiguous().expand(*shape[:2], shape[-1]),
        stop=(-reach[..., 1]).expand(*shape[:2], shape[-1]),
        shift=shape[-1] - q_len + start,
    )
