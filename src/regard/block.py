"""One block of the matrix: some complete rows, their scores and their weights."""

from functools import cached_property

import torch
from torch import Tensor

from regard.indexing import Box, Cut, Index, cut_whole
from regard.masks import Mask
from regard.scores import Scores

__all__ = ["Block"]


class Block:
    """Complete rows of an attention matrix; what a reduction is shown.

    Rows are complete: every key that they may attend to lies in the columns of the block, so the
    softmax of the block is final. Columns outside the block have weight 0.

    Attributes:
        shape: the shape of the whole matrix, (..., num_heads, q_len, kv_len).
        box: where the block lies in it.
        scores: (..., rows, columns), after scale, bias and mask; -inf where a key may not be
            attended to. float32, or float64 for float64 inputs.
    """

    def __init__(self, source: Scores, mask: Mask | None, box: Box, cut: Cut = cut_whole) -> None:
        self.shape = source.shape
        self.box = box
        self._cut = cut
        scores = source.block(box, cut)
        allowed = None if mask is None else mask.block(box, self.shape, source.device)
        self.scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """tensor[index] in the dtype of the scores, for an operand that gradients flow to.

        Args:
            tensor: one of the reduction's ``tensors``.
            index: integers and slices for its first axes; an axis of length 1 broadcasts.
        """
        return self._cut(tensor, index).to(self.scores.dtype)

    @cached_property
    def maximum(self) -> Tensor:
        """The largest score of each row, (..., rows, 1); -inf for a row without keys."""
        return self.scores.amax(-1, keepdim=True)

    @cached_property
    def _without_keys(self) -> Tensor | None:
        """Rows that may attend to nothing, (..., rows, 1); None when there are none."""
        empty = self.maximum.detach() == -torch.inf
        return empty if bool(empty.any()) else None

    @cached_property
    def _safe_scores(self) -> Tensor:
        """The scores, with 0 in rows without keys, where a softmax would give NaN."""
        if self._without_keys is None:
            return self.scores
        return self.scores.masked_fill(self._without_keys, 0.0)

    @cached_property
    def weights(self) -> Tensor:
        """softmax(scores) over the keys, (..., rows, columns); 0 in rows without keys."""
        weights = torch.softmax(self._safe_scores, -1)
        return weights if self._without_keys is None else weights.masked_fill(self._without_keys, 0)

    @cached_property
    def logsumexp(self) -> Tensor:
        """log of the sum of exp(scores) of each row, (..., rows), in nats; -inf without keys."""
        if self.scores.requires_grad:
            lse = torch.logsumexp(self._safe_scores, -1, keepdim=True)
        else:
            # The largest weight is exp(maximum - logsumexp): two cheap passes for a costly one.
            lse = self.maximum - self.weights.amax(-1, keepdim=True).log()
        if self._without_keys is not None:
            lse = lse.masked_fill(self._without_keys, -torch.inf)
        return lse.squeeze(-1)
