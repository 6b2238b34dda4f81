"""One block of the matrix: some complete rows, their scores and their weights."""

from collections.abc import Iterator
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from regard.indexing import Box, Cut, Index, cut_whole
from regard.masks import Mask
from regard.scores import Scores, accumulation_dtype

__all__ = ["Block", "Scratch", "edges", "lowest"]


def lowest(dtype: torch.dtype) -> float:
    """The finite stand-in for a score of -inf, about -1.8e19 in float32.

    Times a weight of 0 it makes 0, not NaN; and so does its product with any usual gradient, which
    would overflow from the lowest finite number.
    """
    return -(torch.finfo(dtype).max ** 0.5)


class Scratch:
    """Memory that one block after another uses again: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(
        self, name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of this shape with unspecified content, valid until the name is taken again."""
        held = self._held.get(name)
        if held is None or held.numel() < prod(size):
            held = torch.empty(prod(size), dtype=dtype, device=device)
            self._held[name] = held
        return held[: prod(size)].view(size)


def edges(mask: Mask, box: Box, shape: torch.Size) -> Iterator[Box]:
    """The parts of a box in which the mask may hide something; elsewhere it allows every key."""
    start, stop = box.columns.start, box.columns.stop
    every = mask.columns(box.leading, box.rows, shape).every
    left, right = max(start, every.start), min(stop, every.stop)
    if left >= right:
        yield box
        return
    if start < left:
        yield box._replace(columns=slice(start, left))
    if right < stop:
        yield box._replace(columns=slice(right, stop))


class Block:
    """Complete rows of an attention matrix; what a reduction is shown.

    Rows are complete: every key that they may attend to lies in the columns of the block, so the
    softmax of the block is final. Columns outside the block have weight 0. Its tensors are valid
    while ``update`` runs; float32, or float64 for float64 inputs.

    Attributes:
        shape: the shape of the whole matrix, (..., num_heads, q_len, kv_len).
        box: where the block lies in it.
        maximum: the largest score of each row, (..., rows, 1); -inf for a row without keys.
        below: scores - maximum, (..., rows, columns): at most 0, and ``lowest(dtype)`` where a key
            may not be attended to.

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
        self.shape = source.shape
        self.box = box
        self._cut = cut
        self._scratch = scratch
        self._dtype = accumulation_dtype(source.dtype)
        self._device = source.device
        self._size = tuple(part.stop - part.start for part in box.at_both)
        scores = source.block(box, cut, self._room("scores"))
        if mask is not None:
            for edge in edges(mask, box, self.shape):
                allowed = mask.block(edge, self.shape, source.device)
                columns = slice(
                    edge.columns.start - box.columns.start, edge.columns.stop - box.columns.start
                )
                scores[..., columns].masked_fill_(~allowed, -torch.inf)
        self.maximum = scores.detach().amax(-1, keepdim=True)
        empty = self.maximum == -torch.inf
        self._empty = empty if bool(empty.any()) else None
        reference = self.maximum if self._empty is None else self.maximum.masked_fill(empty, 0)
        self.below = scores.sub_(reference).clamp_(min=lowest(self._dtype))

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """tensor[index] in the dtype of the scores, for an operand that gradients flow to.

        Args:
            tensor: one of the reduction's ``tensors``.
            index: integers and slices for its first axes; an axis of length 1 broadcasts.
        """
        return self._cut(tensor, index).to(self._dtype)

    @cached_property
    def allowed(self) -> Tensor:
        """True where a key may be attended to, (..., rows, columns); also where a score is NaN."""
        return ~(self.below <= lowest(self._dtype))

    @cached_property
    def scores(self) -> Tensor:
        """After scale, bias and mask, (..., rows, columns); -inf where a key is masked."""
        return torch.where(self.allowed, self.below + self.maximum, -torch.inf)

    @cached_property
    def weights(self) -> Tensor:
        """softmax(scores) over the keys, (..., rows, columns); 0 in rows without keys."""
        weights = torch.softmax(self.below, -1, out=self._room("weights"))
        return weights if self._empty is None else weights.masked_fill(self._empty, 0)

    @cached_property
    def logsumexp(self) -> Tensor:
        """log of the sum of exp(scores) of each row, (..., rows), in nats; -inf without keys."""
        if torch.is_grad_enabled():
            above = torch.logsumexp(self.below, -1, keepdim=True)
        else:
            # The largest weight is exp(maximum - logsumexp): a cheap pass for a costly one.
            above = -self.weights.amax(-1, keepdim=True).log()
        lse = self.maximum + above
        if self._empty is not None:
            lse = lse.masked_fill(self._empty, -torch.inf)
        return lse.squeeze(-1)

    def _room(self, name: str) -> Tensor | None:
        """Where to put a result of the size of the block; None where gradients are wanted."""
        if self._scratch is None:
            return None
        return self._scratch.take(name, self._size, self._dtype, self._device)
