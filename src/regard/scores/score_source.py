"""The abstract source of attention scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from regard.scores.box import Box, Cut, Index
from regard.scores.scratch import Scratch

# Some models mask by adding a low number, which may be the lowest of their dtype or only -10,000.
MASKED_SCORE = -5_000.0
"""A bias this low, or a score this far below the maximum of its row, counts as masked."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and statistics: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for sums of many numbers: float64 where the device has it, else dtype."""
    return dtype if device.type == "mps" else torch.float64


def lowest_score(dtype: torch.dtype) -> float:
    """Return the bound at or below which a shifted score means a masked key.

    It is about -1.8e19 in float32. Masked keys have twice this number instead of -inf, because
    -inf times a weight of 0 is NaN. The lowest finite number would overflow in a product with a
    gradient.
    """
    return -(torch.finfo(dtype).max ** 0.5)


def reads_without_sync(tensor: Tensor) -> bool:
    """Return True if reading the numbers of a tensor needs no device synchronisation."""
    return tensor.device.type == "cpu"


def scratch_scores(scratch: Scratch | None, box: Box, scores: "Scores") -> Tensor | None:
    """Return the scratch memory for the scores of a box; None without scratch."""
    if scratch is None:
        return None
    return scratch.take("scores", box.size, accumulation_dtype(scores.dtype), scores.device)


class Scores(ABC):
    """The scores before mask and softmax, (..., num_heads, q_len, kv_len), block by block."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that gradients flow to."""

    @abstractmethod
    def select(self, index: Index) -> "Scores":
        """Return the scores of a part of the leading axes, as a view where possible."""

    @abstractmethod
    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        """Return the scores of one box, in the accumulation dtype.

        With a scratch, the scores are written to its ``scores`` memory and have no gradients.
        """

    def factors(self, box: Box, cut: Cut) -> tuple[Tensor, Tensor] | None:
        """Return two tensors whose product is the scores of a box; None if there is another step.

        They are (..., num_heads, rows, dim) and (..., num_kv_heads, dim, columns), in the
        accumulation dtype.
        """
        return None

    @abstractmethod
    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        """Return the logits that are added to the softmax denominator only, or None.

        The shape is (..., rows, 1), the dtype the accumulation dtype.
        """

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Scores":
        """Return the same scores with the function applied to every tensor of numbers.

        Index tensors of a score_mod are not passed to the function; they only change device.
        """

    @property
    @abstractmethod
    def facts(self) -> list[str]:
        """The parts of the matrix's repr that describe the scores, such as ``scale=0.5``."""

    @property
    def runs_on_threads(self) -> bool:
        """True if ``block`` may run on several threads at once: it calls no function of a user."""
        return False

    @property
    def group(self) -> int:
        """Group size: a block holds whole groups of heads or lies inside one."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.tensors[0].device
