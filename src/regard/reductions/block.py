"""A block: complete rows of the matrix, their scores and their weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import log
from typing import final

import torch
from torch import Tensor

from regard.masks import Mask
from regard.reductions.largest import largest
from regard.reductions.masked_product import masked_product, operand_part
from regard.reductions.span_sums import span_sums
from regard.scores.box import Box, Cut, Index, cut_whole
from regard.scores.score_source import (
    MASKED_SCORE,
    Scores,
    accumulation_dtype,
    lowest_score,
    reads_without_sync,
    sum_dtype,
)

_HIDDEN = 2  # the score of a masked key is this multiple of ``lowest_score``


def partial_boxes(mask: Mask, box: Box, shape: torch.Size) -> Iterator[Box]:
    """Yield the parts of a box that may contain masked keys; all other keys are allowed."""
    start, stop = box.columns.start, box.columns.stop
    every = mask.key_bounds(box.leading, box.rows, shape).all
    left, right = max(start, every.start), min(stop, every.stop)
    if left >= right:
        yield box
        return
    if start < left:
        yield box._replace(columns=slice(start, left))
    if right < stop:
        yield box._replace(columns=slice(right, stop))


class RowStatistics(ABC):
    """Statistics of complete rows of an attention matrix: what regard's own reductions read.

    Attributes:
        shape: the shape of the whole matrix, (..., num_heads, q_len, kv_len).
        box: the position of the rows in the matrix, and all keys that they may attend to.
        maximum: the largest score of each row, (..., rows, 1); -inf for a row without keys.
            Gradients treat it as a constant, so an answer must not depend on it.
    """

    shape: torch.Size
    box: Box
    maximum: Tensor

    @property
    @abstractmethod
    def largest_score(self) -> Tensor:
        """The largest score of each row, (..., rows): ``maximum`` with its gradients."""

    @property
    @abstractmethod
    def log_normalizer(self) -> Tensor:
        """logsumexp - maximum of each row, (..., rows), in nats.

        0 in rows without keys; NaN in rows with a score of NaN or +inf.
        """

    @property
    @abstractmethod
    def logsumexp(self) -> Tensor:
        """The logsumexp of each row of scores, (..., rows), in nats; -inf without keys."""

    @property
    @abstractmethod
    def mean_shifted(self) -> Tensor:
        """The sum of weights * (scores - maximum) of each row, (..., rows)."""

    @property
    @abstractmethod
    def row_sum(self) -> Tensor:
        """The sum of the weights of each row, (..., rows): 1; less with a sink, 0 without keys."""

    @property
    @abstractmethod
    def visible_keys(self) -> Tensor:
        """The number of visible keys of each row, (..., rows).

        A key is hidden by a mask, or by a bias that puts its score 5,000 or more below the maximum
        of its row: ``MASKED_SCORE``.
        """

    @abstractmethod
    def sum_rows(self, parts: Sequence[slice]) -> Tensor:
        """Return the sums of the weights over parts of the rows, (..., len(parts), columns).

        Args:
            parts: the rows of each sum, in rising order and without overlap.
        """

    def sum_cells(self, parts: Sequence[slice], spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return the sums of the weights over cells, (..., len(parts), len(spans)).

        Args:
            parts: the rows of the cells, in rising order and without overlap.
            spans: (start, stop) of their columns in the block, clipped to its width.
        """
        return span_sums(self.sum_rows(parts), spans)

    @abstractmethod
    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row, and their keys, each (..., rows, k).

        Where a row may attend to fewer than k keys, the remaining weights are 0 and the keys -1. In
        a row with a score of NaN or +inf, all weights are NaN and all keys -1.
        """

    @abstractmethod
    def diagonal(self, offset: int) -> Tensor:
        """Return the weights at ``kv_idx - q_idx == offset``, as far as they lie in the box."""

    @abstractmethod
    def product(self, value: Tensor) -> Tensor:
        """Return weights @ value, (..., rows, value_dim), for the value of an ``Output``."""

    @abstractmethod
    def transposed_product(self, operand: Tensor) -> Tensor:
        """Return weights transposed @ operand, for the operand of a ``TransposedOutput``."""

    @abstractmethod
    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the weights at some rows and columns of the block, those of a ``WeightTile``."""

    def divergence(self, of: object) -> Tensor | None:
        """Return the numbers of a ``Divergence``, (..., rows); None if they are not computed."""
        return None


@final
class Block(RowStatistics):
    """Complete rows of an attention matrix, the input of a reduction.

    All keys that the rows may attend to lie in the columns of the block, so the softmax of the
    block is final. Columns outside the block have weight 0. The tensors are float32, or float64
    for float64 inputs. They are valid while ``update`` runs, and must not be changed.

    If a row has a score of NaN or +inf, its weights are NaN at all keys that it may attend to, and
    0 at masked keys. On devices other than the CPU the masked keys may be NaN, too.

    Attributes:
        shape: the shape of the whole matrix, (..., num_heads, q_len, kv_len).
        box: the position of the block in the matrix.
        maximum: the largest score of each row, (..., rows, 1); -inf for a row without keys.
            Gradients treat it as a constant, so an answer must not depend on it.

    Example:
        >>> import torch, regard
        >>> class Shape(regard.Reduction):
        ...     def start(self, shape, dtype, device):
        ...         return ()
        ...     def update(self, block):
        ...         print(block.box.rows, tuple(block.weights.shape))
        ...         return ()
        ...     def finish(self, buffers, shape):
        ...         return None
        >>> regard.attend(torch.zeros(3, 1), torch.zeros(4, 1)).reduce(Shape())
        slice(0, 3, None) (3, 4)
    """

    def __init__(self, source: Scores, mask: Mask | None, box: Box, cut: Cut = cut_whole) -> None:
        """Compute the scores of a box and their row maxima."""
        self.shape = source.shape
        self.box = box
        self._cut = cut
        self._dtype = accumulation_dtype(source.dtype)
        self._sink = source.sink(box, cut)
        scores = source.block(box, cut)
        if mask is not None:
            scores = scores.masked_fill(~mask.block(box, self.shape, source.device), -torch.inf)
        self.maximum = scores.detach().amax(-1, keepdim=True)
        self._empty = self.maximum == -torch.inf
        self._raw_scores = scores
        self._undefined = ~(self._empty | (self._largest_logit < torch.inf))
        if reads_without_sync(scores) and bool(self._undefined.any()):
            seen = self._undefined & (scores.detach() != -torch.inf)
            scores = scores + torch.zeros_like(scores).masked_fill(seen, torch.nan)
        self._reference = self.maximum.masked_fill(self._empty | self._undefined, 0)
        self._scores = scores

    @property
    def _largest_logit(self) -> Tensor:
        """The maximum of each row, or its sink where that is larger, (..., rows, 1)."""
        if self._sink is None:
            return self.maximum
        return torch.maximum(self.maximum, self._sink.detach())

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """Return tensor[index] in the dtype of the scores, for an operand with gradients.

        Args:
            tensor: one of the ``tensors`` of the reduction.
            index: integers and slices for its first axes; an axis of length 1 broadcasts.
        """
        return self._cut(tensor, index).to(self._dtype)

    def aligned_block(self, source: Scores, mask: Mask | None, columns: slice) -> "Block":
        """Return the same rows of another matrix of the same shape.

        Args:
            source: the scores of the other matrix. ``Reduction.tensors`` must include its tensors.
            mask: the mask of the other matrix.
            columns: all keys that these rows of the other matrix may attend to.
        """
        if self._dtype != accumulation_dtype(source.dtype):  # the dense backend is in float64
            source = source.map(lambda tensor: tensor.to(self._dtype))
        return Block(source, mask, self.box._replace(columns=columns), self._cut)

    @cached_property
    def shifted(self) -> Tensor:
        """scores - maximum, (..., rows, columns), in nats; <= ``lowest_score(dtype)`` if masked."""
        least = self._reference.new_full((), _HIDDEN * lowest_score(self._dtype))
        return torch.maximum(self._scores - self._reference, least)  # clamp stops NaN gradients

    @cached_property
    def allowed(self) -> Tensor:
        """True where a key may be attended to or its score is NaN, (..., rows, columns)."""
        return ~(self.shifted <= lowest_score(self._dtype))

    @cached_property
    def scores(self) -> Tensor:
        """The scores after scale, bias, score_mod, softcap and mask, (..., rows, columns).

        The score of a masked key is -inf.
        """
        return torch.where(self.allowed, self.shifted + self._reference, -torch.inf)

    @cached_property
    def weights(self) -> Tensor:
        """exp(scores - logsumexp), (..., rows, columns); 0 in rows without keys."""
        weights = torch.softmax(self.shifted, -1)
        if self._sink is not None:
            weights = weights * (self._log_sum - self.log_normalizer[..., None]).exp()
        if reads_without_sync(weights) and bool(self._undefined.any()):
            weights = weights.masked_fill(self._undefined & ~self.allowed, 0)
        if reads_without_sync(weights) and not bool(self._empty.any()):
            return weights
        return weights.masked_fill(self._empty, 0)

    @cached_property
    def _log_sum(self) -> Tensor:
        """log(sum(exp(shifted))) of each row without the sink, (..., rows, 1)."""
        # exp takes up to 100 times as long near underflow, where it adds nothing.
        least = self._reference.new_full((), 0.9 * log(torch.finfo(self._dtype).tiny))
        return torch.logsumexp(torch.maximum(self.shifted, least), -1, keepdim=True)

    @property
    def largest_score(self) -> Tensor:
        # amax would send the gradient of a row without keys to its masked keys.
        largest = self._raw_scores.amax(-1, keepdim=True)
        return largest.masked_fill(self._empty, -torch.inf).squeeze(-1)

    @property
    def log_normalizer(self) -> Tensor:
        normalizer = self._log_sum
        if self._sink is not None:
            normalizer = torch.logaddexp(normalizer, self._sink - self._reference)
        return normalizer.masked_fill(self._empty, 0).squeeze(-1)

    @property
    def logsumexp(self) -> Tensor:
        logsumexp = self._reference + self.log_normalizer[..., None]
        values = logsumexp.detach()  # writing to these numbers keeps the gradients
        if self._sink is not None:  # the sum above cancels if the sink is far above the scores
            values.copy_(torch.logaddexp(self._reference + self._log_sum, self._sink).detach())
        values.masked_fill_(self._empty, -torch.inf)
        values.copy_(torch.where(self._undefined, self._largest_logit, values))
        return logsumexp.squeeze(-1)

    @property
    def mean_shifted(self) -> Tensor:
        return (self.weights * self.shifted).sum(-1)

    @property
    def row_sum(self) -> Tensor:
        if self._sink is not None:
            return self.weights.sum(-1)
        row_sum = (~self._empty).to(self._dtype).masked_fill(self._undefined, torch.nan)
        return row_sum.squeeze(-1)

    @property
    def visible_keys(self) -> Tensor:
        return (self.shifted.detach() > MASKED_SCORE).sum(-1, dtype=torch.int32)

    def sum_rows(self, parts: Sequence[slice]) -> Tensor:
        # One split instead of slices: the gradient of a slice is as large as the block.
        edges = [0, *(edge for part in parts for edge in (part.start, part.stop))]
        rows = self.weights.shape[-2]
        sizes = [*(stop - start for start, stop in pairwise(edges)), rows - edges[-1]]
        parts_of_weights = self.weights.split_with_sizes(sizes, -2)[1::2]
        dtype = sum_dtype(self._dtype, self.maximum.device)
        return torch.stack([part.sum(-2, dtype=dtype) for part in parts_of_weights], -2)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        shifted = self.shifted.detach()
        columns = largest(shifted, min(k, shifted.shape[-1]))
        masked = shifted.gather(-1, columns) <= lowest_score(self._dtype)
        weights = self.weights.gather(-1, columns).masked_fill(self._undefined, torch.nan)
        keys = (columns + self.box.columns.start).masked_fill(masked | self._undefined, -1)
        missing = (0, k - columns.shape[-1])
        pad = torch.nn.functional.pad
        weights = pad(weights, missing).masked_fill(self._undefined, torch.nan)
        return weights, pad(keys, missing, value=-1)

    def diagonal(self, offset: int) -> Tensor:
        offset += self.box.rows.start - self.box.columns.start
        return self.weights.diagonal(offset, dim1=-2, dim2=-1)

    def product(self, value: Tensor) -> Tensor:
        operand = operand_part(self, value, self.box.columns)
        return masked_product(self.weights, operand, lambda: self.allowed)

    def transposed_product(self, operand: Tensor) -> Tensor:
        part = operand_part(self, operand, self.box.rows)
        return masked_product(self.weights.mT, part, lambda: self.allowed.mT)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        return self.weights[..., rows, columns]
