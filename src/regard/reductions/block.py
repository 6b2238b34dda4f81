"""A block: complete rows of the matrix, their scores and their weights."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import cast

import torch
from torch import Tensor

from regard.masks import Mask
from regard.scores.box import Box, Cut, Index, cut_whole
from regard.scores.score_source import Scores, accumulation_dtype
from regard.scores.scratch import Scratch

__all__ = ["Block", "lowest_score", "partial_boxes", "reads_without_sync"]

_IN_CACHE = 2**18  # numbers
_HIDDEN = 2  # a masked key has this multiple of the lowest score
_ROWS_IN_PRODUCT = 32


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


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sum over the rows of a tensor (..., rows, columns), as (..., columns).

    A matrix product is the fastest sum, but it adds one row after the other in float32, and the
    roundings of many rows add up. So each product has few rows.
    """
    height = rows.shape[-2]
    if height <= _ROWS_IN_PRODUCT:
        return (rows.new_ones(*rows.shape[:-2], 1, height) @ rows).squeeze(-2)
    even = height // _ROWS_IN_PRODUCT * _ROWS_IN_PRODUCT
    few_rows = cast(Tensor, rows[..., :even, :].unflatten(-2, (-1, _ROWS_IN_PRODUCT)))
    parts = [_sum_of_rows(few_rows)]
    if even < height:
        parts.append(_sum_of_rows(rows[..., even:, :])[..., None, :])
    return torch.cat(parts, -2).sum(-2)


class Block:
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

    def __init__(
        self,
        source: Scores,
        mask: Mask | None,
        box: Box,
        cut: Cut = cut_whole,
        scratch: Scratch | None = None,
    ) -> None:
        """Compute the scores of a box and their row maxima.

        With ``scratch`` and gradients enabled, the tensors of the block are leaves of autograd's
        graph. ``sources`` then computes the gradients of the scores from the gradients of these
        leaves. Without ``scratch`` the tensors are ordinary parts of the graph.
        """
        self.shape = source.shape
        self.box = box
        self._cut = cut
        self._scratch = scratch
        self._staged = scratch is not None and torch.is_grad_enabled()
        self._dtype = accumulation_dtype(source.dtype)
        self._device = source.device
        self._size = tuple(part.stop - part.start for part in box.at_both)
        self._beside: list[Block] = []
        self._source_sink = source.sink(box, cut)
        self._source_scores = source.block(box, cut, None if self._staged else scratch)
        self._is_masked = False
        scores = self._masked(mask)
        self.maximum = scores.detach().amax(-1, keepdim=True)
        self._empty, self._undefined = self._special_rows()
        if self._undefined is not None:
            scores = self._with_nan(scores, self._undefined)
        self._scores = scores  # ``shifted`` may overwrite it, which does not change its softmax
        self._reference = self.maximum
        for special in (self._empty, self._undefined):
            if special is not None:
                self._reference = self._reference.masked_fill(special, 0)

    def _masked(self, mask: Mask | None) -> Tensor:
        scores = self._source_scores
        if self._staged:
            scores = self._scratched("scores").copy_(scores.detach())
        if mask is not None and self._scratch is None:  # autograd may need the scores as they are
            scores = scores.masked_fill(~mask.block(self.box, self.shape, self._device), -torch.inf)
        elif mask is not None:
            for edge in partial_boxes(mask, self.box, self.shape):
                start = self.box.columns.start
                columns = slice(edge.columns.start - start, edge.columns.stop - start)
                hidden = ~mask.block(edge, self.shape, self._device)
                scores[..., columns].masked_fill_(hidden, -torch.inf)
                self._is_masked = True
        return scores

    def _special_rows(self) -> tuple[Tensor | None, Tensor | None]:
        """Return two bool tensors, (..., rows, 1): rows without keys, and undefined rows.

        A row is undefined if it has keys, and one of their scores or the sink is NaN or +inf. On
        the CPU each result is None if it would be all False. On other devices the second result is
        always None, because a search for undefined rows would synchronise the device.
        """
        if not reads_without_sync(self.maximum):
            return self.maximum == -torch.inf, None
        total = self.maximum.sum()
        if self._source_sink is not None:
            total = total + self._source_sink.detach().sum()
        if isfinite(total.item()):
            return None, None
        empty = self.maximum == -torch.inf
        undefined = ~(empty | (self._largest_logit < torch.inf))
        found = [rows if bool(rows.any()) else None for rows in (empty, undefined)]
        return found[0], found[1]

    @property
    def _largest_logit(self) -> Tensor:
        """The maximum of each row, or its sink where that is larger, (..., rows, 1)."""
        if self._source_sink is None:
            return self.maximum
        return torch.maximum(self.maximum, self._source_sink.detach())

    def _with_nan(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Return the scores with NaN at each visible key of these rows."""
        seen = rows & (scores.detach() != -torch.inf)
        if self._scratch is None:
            return scores.masked_fill(seen, torch.nan)
        return scores.masked_fill_(seen, torch.nan)

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
        if self._scratch is None:  # the dense backend computes both matrices in float64
            source = source.map(lambda tensor: tensor.to(self._dtype))
        scratch = None if self._scratch is None else self._scratch.another
        for _ in self._beside:
            scratch = None if scratch is None else scratch.another
        other = Block(source, mask, self.box._replace(columns=columns), self._cut, scratch)
        self._beside.append(other)
        return other

    @cached_property
    def shifted(self) -> Tensor:
        """scores - maximum, (..., rows, columns), in nats; <= ``lowest_score(dtype)`` if masked."""
        if self._scratch is None:
            return (self._scores - self._reference).clamp(min=self._least)
        shifted = self._scores.sub_(self._reference)
        # A pass that reads costs less than half of one that writes.
        look = reads_without_sync(shifted) and not self._is_masked
        if not (look and shifted.amin().item() >= self._least):
            shifted.clamp_(min=self._least)
        return self._leaf(shifted)

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
        if self._scratch is None:
            weights = (self.shifted - self._log_divisors).exp()
            return weights if self._empty is None else weights.masked_fill(self._empty, 0)
        weights = self._softmax
        if self._source_sink is not None:
            shares = (self._log_sum - self.log_normalizer.detach()[..., None]).exp_()
            for special in (self._empty, self._undefined):
                shares = shares if special is None else shares.masked_fill_(special, 1)
            weights.mul_(shares)
        return self._leaf(weights)

    @cached_property
    def _softmax(self) -> Tensor:
        """The softmax over the keys without the sink; ``weights`` may overwrite its memory."""
        weights = torch.softmax(self._scores.detach(), -1, out=self._scratched("weights"))
        if self._empty is not None:
            weights.masked_fill_(self._empty, 0)
        if self._undefined is not None:
            weights.masked_fill_(self._undefined & ~self.allowed, 0)
        return weights

    @cached_property
    def _log_sum(self) -> Tensor:
        """log(sum(exp(shifted))) of each row without the sink, (..., rows, 1)."""
        if self._scratch is None:
            return torch.logsumexp(self.shifted, -1, keepdim=True)
        # The largest weight is 1 / sum.
        return self._softmax.amax(-1, keepdim=True).log_().neg_()

    @cached_property
    def log_normalizer(self) -> Tensor:
        """logsumexp - maximum of each row, (..., rows), in nats.

        0 in rows without keys; NaN in rows with a score of NaN or +inf.
        """
        normalizer = self._log_sum
        if self._source_sink is not None:
            sink = self._source_sink.detach() if self._staged else self._source_sink
            normalizer = torch.logaddexp(normalizer, sink - self._reference)
        if self._empty is not None:
            normalizer = normalizer.masked_fill(self._empty, 0)
        return self._leaf(normalizer.squeeze(-1))

    @property
    def _log_divisors(self) -> Tensor:
        """The number that turns ``shifted`` into log-weights when subtracted, (..., rows, 1).

        0 in undefined rows: there ``shifted`` is NaN already, and only where a key is not masked.
        """
        divisors = self.log_normalizer[..., None]
        return divisors if self._undefined is None else divisors.masked_fill(self._undefined, 0)

    @property
    def logsumexp(self) -> Tensor:
        """The logsumexp of each row of scores, (..., rows), in nats; -inf without keys."""
        logsumexp = self._reference.squeeze(-1) + self.log_normalizer
        if self._source_sink is not None:
            # The sum cancels if the sink is far above the scores, but its gradient is right.
            of_keys = self._reference + self._log_sum.detach()
            exact = torch.logaddexp(of_keys, self._source_sink.detach()).squeeze(-1)
            logsumexp = exact + (logsumexp - logsumexp.detach())
        if self._empty is not None:
            logsumexp = logsumexp.masked_fill(self._empty.squeeze(-1), -torch.inf)
        if self._undefined is None:
            return logsumexp
        return torch.where(self._undefined, self._largest_logit, logsumexp[..., None]).squeeze(-1)

    @cached_property
    def mean_shifted(self) -> Tensor:
        """The sum of ``weights * shifted`` of each row, (..., rows)."""
        if self._scratch is None:
            return (self.weights * self.shifted).sum(-1)
        if self._staged:
            _ = self.shifted  # the gradient needs it, too
        columns = self._size[-1]
        weights, scores = self.weights.detach().view(-1, columns), self._scores.detach()
        scores, reference = scores.view(-1, columns), self._reference.reshape(-1, 1)
        total = weights.new_empty(len(weights))
        step = max(1, _IN_CACHE // columns) if reads_without_sync(weights) else len(weights)
        products = self._scratched("products").view(-1, columns)
        for start in range(0, len(weights), step):
            rows = slice(start, start + step)
            product = products[: len(total[rows])]
            if "shifted" in self.__dict__:
                torch.mul(weights[rows], scores[rows], out=product)
            else:
                torch.sub(scores[rows], reference[rows], out=product)
                product.clamp_(min=self._least).mul_(weights[rows])
            torch.sum(product, -1, out=total[rows])
        return self._leaf(total.view(self._size[:-1]))

    @cached_property
    def row_sum(self) -> Tensor:
        """The sum of the weights of each row, (..., rows): 1; less with a sink, 0 without keys."""
        if self._source_sink is not None:
            return self.weights.sum(-1)
        row_sum = (self.maximum > -torch.inf).to(self._dtype)
        if self._undefined is not None:
            row_sum = row_sum.masked_fill(self._undefined, torch.nan)
        return row_sum.squeeze(-1)

    @cached_property
    def column_sum(self) -> Tensor:
        """The sum of the weights of all rows of the block, (..., columns)."""
        return self.sum_rows([slice(0, self._size[-2])]).squeeze(-2)

    def sum_rows(self, parts: Sequence[slice]) -> Tensor:
        """Return the sums of the weights over parts of the rows, (..., len(parts), columns).

        Args:
            parts: the rows of each sum, in rising order and without overlap.
        """
        if self._scratch is None or self._staged or not reads_without_sync(self.maximum):
            # One split instead of slices: the gradient of a slice is as large as the block.
            edges = [0, *(edge for part in parts for edge in (part.start, part.stop))]
            sizes = [*(stop - start for start, stop in pairwise(edges)), self._size[-2] - edges[-1]]
            pieces = self.weights.split_with_sizes(sizes, -2)[1::2]
            return torch.stack([piece.sum(-2) for piece in pieces], -2)
        rows, columns = self._size[-2:]
        height = rows // len(parts)
        even = [slice(place * height, (place + 1) * height) for place in range(len(parts))]
        if even == list(parts) and even[-1].stop == rows:
            return _sum_of_rows(self.weights.view(*self._size[:-2], len(parts), height, columns))
        return torch.stack([_sum_of_rows(self.weights[..., part, :]) for part in parts], -2)

    # The gradients of a block whose tensors are leaves.

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that were read so far, of this block and of its aligned blocks."""
        names = ("shifted", "weights", "log_normalizer", "mean_shifted")
        read = [self.__dict__[name] for name in names if name in self.__dict__]
        return read + [leaf for other in self._beside for leaf in other.leaves]

    def sources(self, gradients: Callable[[Tensor], Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Return the sink and the scores of this block and its aligned blocks, with gradients.

        Each pair is a tensor and its gradient.

        With weights w, gradients g and e the row's ``mean_shifted``, the gradient of score j is
        ``w_j (g_weights_j - sum(w g_weights) + g_e (1 + shifted_j - e) + g_log_normalizer)`` plus
        the gradient of ``shifted``: the derivative of the softmax, with the maximum as a constant.

        Args:
            gradients: returns the gradient of a leaf, or None if nothing depends on it.
        """

        def of(name: str) -> Tensor | None:
            return gradients(self.__dict__[name]) if name in self.__dict__ else None

        found = [pair for other in self._beside for pair in other.sources(gradients)]
        of_weights, of_shifted = of("weights"), of("shifted")
        of_mean, of_normalizer = of("mean_shifted"), of("log_normalizer")
        weights = self.weights.detach()
        row = torch.zeros_like(self.maximum) if of_normalizer is None else of_normalizer[..., None]
        of_scores = self._scratched("product")
        if of_mean is not None:
            row = row - (self.mean_shifted.detach() * of_mean)[..., None]
        if of_weights is not None:
            product = torch.mul(weights, of_weights, out=self._scratched("second product"))
            row = row - product.sum(-1, keepdim=True)
        if self._empty is not None:
            row = row.masked_fill(self._empty, 0)
        if self._source_sink is not None:
            sink = self._source_sink.detach() - self._reference
            of_sink = (sink - self.log_normalizer.detach()[..., None]).exp()
            if self._empty is not None:
                of_sink = of_sink.masked_fill(self._empty, 0)
            found.append((self._source_sink, row * of_sink))
        if of_mean is not None:
            row = row + of_mean[..., None]
            torch.addcmul(row, self.shifted.detach(), of_mean[..., None], out=of_scores)
            if of_weights is not None:
                of_scores.add_(of_weights)
            of_scores.mul_(weights)
        elif of_weights is not None:
            torch.add(of_weights, row, out=of_scores).mul_(weights)
        else:
            torch.mul(weights, row, out=of_scores)
        if of_shifted is not None:
            of_scores.add_(of_shifted.masked_fill(~self.allowed, 0))
        return [*found, (self._source_scores, of_scores)]

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return the tensor, as a new leaf of autograd if ``sources`` computes the gradients."""
        return tensor.detach().requires_grad_() if self._staged else tensor

    @property
    def _least(self) -> float:
        """The finite number that stands for -inf in ``shifted``."""
        return _HIDDEN * lowest_score(self._dtype)

    def _scratched(self, name: str) -> Tensor:
        assert self._scratch is not None
        return self._scratch.take(name, self._size, self._dtype, self._device)
