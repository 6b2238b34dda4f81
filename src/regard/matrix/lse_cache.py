"""The logsumexp of rows, remembered while the inputs stay as they are: columns without sweeps.

With it a weight is one score away, exp(score - logsumexp), however long its row is. PyTorch counts
how often a tensor was changed in place, and that is asked each time. Changes through ``.data`` or
NumPy it does not count, and what a callable (score_mod, mask_mod) reads is not seen: they must not
change while their matrix is in use.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.masks import Mask
from regard.scores.box import Index
from regard.scores.score_source import Scores, accumulation_dtype

__all__ = ["RowMemory"]


@dataclass(frozen=True, eq=False)
class RowMemory:
    """What is known of the rows of one matrix, and of which state of its inputs.

    Attributes:
        logsumexp: (..., num_heads, q_len); NaN where nobody asked yet.
        versions: how often each input had been changed in place; None where PyTorch does not
            count, so that nothing may be remembered.
    """

    logsumexp: Tensor
    versions: tuple[int, ...] | None

    @classmethod
    def empty(cls, source: Scores, mask: Mask | None) -> "RowMemory":
        """A memory in which nothing is known."""
        dtype = accumulation_dtype(source.dtype)
        with torch.inference_mode(False):  # an inference tensor could not be added to later
            unknown = torch.full(source.shape[:-1], torch.nan, dtype=dtype, device=source.device)
        return cls(unknown, _versions(source, mask))

    def holds(self, source: Scores, mask: Mask | None) -> bool:
        """Whether the inputs are as they were."""
        return self.versions is not None and self.versions == _versions(source, mask)

    def part(self, index: Index, source: Scores, mask: Mask | None) -> "RowMemory":
        """What is known of a part of the leading axes, whose inputs may be copies."""
        return RowMemory(self.logsumexp[index], _versions(source, mask))


def _versions(source: Scores, mask: Mask | None) -> tuple[int, ...] | None:
    tensors = [*source.tensors, *([] if mask is None else mask.tensors)]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)
