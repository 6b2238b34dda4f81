"""Weighted sums of attention weights: the losses of guided attention and of alignment."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import cast, final

import torch
from torch import Tensor

from regard.errors import check_broadcast, check_floating
from regard.matrix.attention_matrix import AttentionMatrix, check_attention_matrix
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.flex_callable import FlexCallable, Kind
from regard.scores.score_source import reads_without_sync

WeightOf = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""weight(b, h, q_idx, kv_idx) -> number, like the callables of FlexAttention."""

_KIND = Kind(
    "weight",
    ("b", "h", "q_idx", "kv_idx"),
    "one floating number",
    takes_score=False,
    otherwise="If you have the numbers, pass a tensor that broadcasts to the matrix.",
)


def weighted_sum(A: AttentionMatrix, weight: Tensor | WeightOf) -> Tensor:
    """Compute the weighted sum of each row: sum over j of A[i, j] * weight[i, j].

    As a loss it penalises attention to the wrong keys. A callable needs no tensor of size
    q_len x kv_len. For a weight of low rank, ``u @ v.T``, use ``((A @ v) * u).sum(-1)``.

    Args:
        A: (..., num_heads, q_len, kv_len).
        weight: a floating tensor that broadcasts to the shape of A, or a callable
            weight(b, h, q_idx, kv_idx) that returns one number. Its arguments are scalar tensors,
            and ``torch.vmap`` runs it over blocks. b is the flat index over all batch axes.

    Returns:
        (..., num_heads, q_len), float32, or float64 for a float64 matrix. It is differentiable in A
        and in a weight tensor. A row without keys gives 0.

    Raises:
        TypeError: weight is not callable, and not a floating tensor.
        ValueError: weight does not broadcast to A, or the callable fails.

    Example:
        Guided attention: speech and text advance together, so attention far from the diagonal adds
        to the loss.

        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> A = regard.attend(x, x)
        >>> def far(b, h, q_idx, kv_idx):
        ...     return 1 - torch.exp(-(((q_idx - kv_idx) / 3) ** 2) / (2 * 0.2**2))
        >>> regard.weighted_sum(A, far)
        tensor([0.5823, 0.5004, 0.5823])

    Source:
        Tachibana et al. 2018, "Efficiently Trainable Text-to-Speech System Based on Deep
        Convolutional Networks with Guided Attention", section 3.4.
    """
    check_attention_matrix("A", A)
    return cast(Tensor, A.reduce(WeightedSum(weight)))


@final
@dataclass(frozen=True, eq=False)
class WeightedSum(Reduction):
    """The reduction behind ``regard.weighted_sum``.

    Args:
        weight: a floating tensor that broadcasts to the matrix, or a callable.
    """

    weight: Tensor | WeightOf

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if isinstance(self.weight, Tensor) else ()

    @property
    def runs_on_threads(self) -> bool:
        return isinstance(self.weight, Tensor)

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        if isinstance(self.weight, Tensor):
            check_floating("weight", self.weight, "(..., num_heads, q_len, kv_len)")
            check_broadcast("weight", self.weight, shape, device, "matrix")
        else:
            FlexCallable.fitted(self.weight, _KIND, shape, device)
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        numbers = self._numbers(block)
        sums = cast(Tensor, torch.linalg.vecdot(block.weights, numbers))
        if reads_without_sync(sums) and not isfinite(sums.detach().sum().item()):
            # A weight of 0 times NaN is NaN: numbers at masked keys must not count.
            numbers = torch.where(block.allowed, numbers, 0)
            sums = cast(Tensor, torch.linalg.vecdot(block.weights, numbers))
        return (Contribution(block.box.at_rows, sums),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]

    def _numbers(self, block: Block) -> Tensor:
        """Return the values of ``weight`` for a block, broadcastable to its weights."""
        if isinstance(self.weight, Tensor):
            box = block.box.at_both
            return block.part(self.weight, box[len(box) - self.weight.ndim :])
        of_box = FlexCallable.untried(self.weight, block.shape, block.maximum.device)
        return of_box(block.box).to(block.maximum.dtype)
