"""Position biases: numbers added to the scores that depend on the distance of key and query.

A bias is a small immutable value. ``bind`` checks it and fits it to the shape of a matrix. If
``q_len != kv_len``, the last query is aligned with the last key, as in masks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import (
    check_count,
    check_floating,
    is_whole,
    kind_text,
    shape_text,
)
from regard.scores.box import Box


class Bias(ABC):
    """Numbers added to the scores that depend only on kv_idx - q_idx and the head.

    A bias costs one addition for each score: the numbers of all distances are computed once for
    a block, in O(length) time, and copied along the diagonals.

    ``along`` runs on the calling thread. On a CPU it can run on several threads at once, which is
    faster: set ``thread_safe = True`` in the subclass. ``along`` must then change only local
    variables.

    Attributes:
        thread_safe: True if ``along`` may run on several threads at once; False by default. A
            subclass does not inherit it.

    Example:
        >>> import torch, regard
        >>> class LogDistance(regard.Bias):
        ...     def bind(self, shape, device):
        ...         return self
        ...     @property
        ...     def tensors(self):
        ...         return ()
        ...     def map(self, function):
        ...         return self
        ...     def along(self, distance, part):
        ...         return -distance.abs().float().log1p()
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, bias=LogDistance())[0]
        tensor([0.5455, 0.2727, 0.1818])
    """

    thread_safe: ClassVar[bool] = False

    @abstractmethod
    def bind(self, shape: torch.Size, device: torch.device) -> "Bias":
        """Return the bias fitted to a matrix of this shape.

        Its tensors have all leading axes of the matrix, each of full length or 1, and two more.
        """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that gradients flow to."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Bias":
        """Return the same bound bias with the function applied to each of its tensors."""

    @abstractmethod
    def along(self, distance: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the bias at each distance, broadcastable to (..., num_heads, 1, distances).

        Args:
            distance: kv_idx - q_idx, whole numbers, (distances,).
            part: returns the part of a tensor of the bias that belongs to the heads of a block, in
                the dtype of the scores.
        """

    @property
    def runs_on_threads(self) -> bool:
        """True if the bias is thread-safe."""
        return vars(type(self)).get("thread_safe", False)

    def block(
        self, box: Box, shape: torch.Size, device: torch.device, part: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the part of the bias for a box, broadcastable to the box.

        ``shape`` is the shape of the whole matrix.
        """
        (rows, columns), step = box.size[-2:], box.rows.step or 1
        last = range(box.rows.start, box.rows.stop, step)[-1]
        least = box.columns.start - last - (shape[-1] - shape[-2])
        distance = torch.arange(least, least + rows * step + columns, device=device)
        return _skewed(self.along(distance, part), rows, step)


def _skewed(along: Tensor, rows: int, step: int) -> Tensor:
    """Copy numbers along diagonals: (..., 1, rows * step + columns) to (..., rows, columns).

    Entry [i, j] is ``along[(rows - 1 - i) * step + j]``; the last numbers are not used. The numbers
    are repeated once for each row. A reshape to rows that are ``step`` shorter then shifts each row
    by ``step``.

    Source:
        Huang et al. 2018, "Music Transformer", section 3.4.1: skewing, in the opposite direction.
    """
    period = along.shape[-1]
    repeated = along.expand(*along.shape[:-2], rows, period).flatten(-2)
    stepped = repeated[..., (rows - 1) * step : rows * period - step]
    by_row = stepped.reshape(*stepped.shape[:-1], rows, period - step)
    return by_row[..., : period - rows * step]


@final
@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """Attention with linear biases: -slope · |kv_idx - q_idx|, a slope for each head.

    The paper's attention is causal. Without a causal mask, keys after the query are penalised like
    those before it. If q_len and kv_len differ, the last query is aligned with the last key.

    Args:
        slopes: (num_heads,), one slope for each head, differentiable; or num_heads, for the
            paper's slopes.

    Raises:
        TypeError: slopes are neither a whole number nor a floating tensor.
        ValueError: the number of heads differs from that of the matrix.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 3, 1)
        >>> A = regard.attend(x, x, bias=regard.ALiBi(2), mask=regard.Causal())
        >>> A.scores[:, 2]
        tensor([[-0.1250, -0.0625,  0.0000],
                [-0.0078, -0.0039,  0.0000]])

    Source:
        Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input
        Length Extrapolation", section 3; for a num_heads that is not a power of two, footnote 8
        and the authors' ``get_slopes``.
    """

    thread_safe = True

    slopes: Tensor

    def __init__(self, slopes: Tensor | int) -> None:
        if isinstance(slopes, Tensor):
            tensor = check_floating("slopes", slopes, "(num_heads,)")
        elif is_whole(slopes):
            tensor = torch.tensor(_slopes(check_count("slopes", slopes)), device="cpu")
        else:
            raise TypeError(
                f"slopes is {kind_text(slopes)}; it must be the number of heads, or a floating "
                "tensor (num_heads,).\n    Use torch.tensor(slopes), or ALiBi(num_heads)."
            )
        object.__setattr__(self, "slopes", tensor)

    def bind(self, shape: torch.Size, device: torch.device) -> Bias:
        num_heads = shape[-3] if len(shape) > 2 else 1
        if self.slopes.shape != (num_heads,):
            raise ValueError(
                f"slopes has shape {shape_text(self.slopes.shape)}; a matrix of shape "
                f"{shape_text(shape)} needs ({num_heads},), one slope for each head.\n"
                f"    For the slopes of the paper use ALiBi({num_heads})."
            )
        return ALiBi(_by_head(self.slopes[:, None, None].to(device), shape))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def map(self, function: Callable[[Tensor], Tensor]) -> Bias:
        return ALiBi(function(self.slopes))

    def along(self, distance: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return part(self.slopes) * -distance.abs()

    def __repr__(self) -> str:
        return f"ALiBi({self.slopes.numel()})"


def _slopes(num_heads: int) -> list[float]:
    """Return the slopes of the paper.

    The slopes are a geometric sequence. If num_heads is not a power of two, let p be the largest
    power of two below it. The first p heads have the slopes of p heads. The other heads have every
    other slope of 2 p heads, starting with the first.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return first + between


@final
@dataclass(frozen=True, eq=False)
class T5Bias(Bias):
    """T5's relative positions: a learned number for each head and bucket of distances.

    Half of the buckets hold one distance each, the others increasingly long ranges of distances, up
    to ``max_distance``. If q_len and kv_len differ, the last query is aligned with the last key.

    Args:
        table: (num_buckets, num_heads), the weight of T5's ``relative_attention_bias``,
            differentiable.
        bidirectional: True if keys after the query have half of the buckets, as in an encoder.
            If False, as in a decoder, they all count as distance 0.
        max_distance: keys at this distance or further away share the last bucket.

    Raises:
        TypeError: the table is not a floating tensor.
        ValueError: the table has another shape, or max_distance is too small for its buckets.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 3, 1)
        >>> table = torch.arange(8.0)[:, None]
        >>> regard.attend(x, x, bias=regard.T5Bias(table)).scores[0, :]
        tensor([[0., 5., 6.],
                [1., 0., 5.],
                [2., 1., 0.]])

    Source:
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer", section 2.1; the buckets are those of the authors' code, which
        ``T5Attention._relative_position_bucket`` of transformers repeats.
    """

    thread_safe = True

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_floating("table", self.table, "(num_buckets, num_heads)")
        check_count("max_distance", self.max_distance)

    def bind(self, shape: torch.Size, device: torch.device) -> Bias:
        num_heads = shape[-3] if len(shape) > 2 else 1
        if self.table.ndim != 2 or self.table.shape[-1] != num_heads:
            raise ValueError(
                f"table has shape {shape_text(self.table.shape)}; a matrix of shape "
                f"{shape_text(shape)} needs (num_buckets, {num_heads}), a number for each bucket "
                "and head.\n    Pass the weight of the model's relative_attention_bias."
            )
        self._check_buckets(self.table.shape[0])
        table = self.table.to(device).mT[:, None, :]
        return T5Bias(_by_head(table, shape), self.bidirectional, self.max_distance)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def map(self, function: Callable[[Tensor], Tensor]) -> Bias:
        return T5Bias(function(self.table), self.bidirectional, self.max_distance)

    def along(self, distance: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        table = part(self.table)  # (..., num_heads, 1, num_buckets)
        # On a GPU the gradient of an embedding adds in a fixed order, unlike index_select's.
        numbers = F.embedding(self._bucket(distance), table.flatten(0, -2).mT)
        return numbers.mT.reshape(*table.shape[:-1], -1).contiguous()

    def _check_buckets(self, num_buckets: int) -> None:
        least = 4 if self.bidirectional else 2
        if num_buckets < least:
            raise ValueError(
                f"table has {num_buckets} buckets; bidirectional={self.bidirectional} needs at "
                f"least {least}.\n    T5 has 32."
            )
        if self.max_distance <= num_buckets // least:
            raise ValueError(
                f"max_distance is {self.max_distance}; with {num_buckets} buckets it must be more "
                f"than {num_buckets // least}, the distances with a bucket of their own.\n"
                "    T5 has max_distance=128."
            )

    def _bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance kv_idx - q_idx."""
        num_buckets = self.table.shape[-1] // (2 if self.bidirectional else 1)
        single = num_buckets // 2  # the number of buckets that hold one distance each
        away = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        growth = torch.log(away.clamp(min=single).float() / single)
        wide = growth / log(self.max_distance / single) * (num_buckets - single)
        bucket = torch.where(away < single, away, single + wide.long()).clamp(max=num_buckets - 1)
        return bucket + (distance > 0) * num_buckets if self.bidirectional else bucket

    def __repr__(self) -> str:
        return f"T5Bias(bidirectional={self.bidirectional}, max_distance={self.max_distance})"


def _by_head(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor (num_heads, 1, n) with all leading axes of the matrix; batch axes are 1."""
    if len(shape) == 2:
        return tensor[0]
    return tensor.reshape(*(1 for _ in shape[:-3]), *tensor.shape)
