"""Which mask a dense one is: what models pass as bool tensors, or as numbers of 0 and -inf.

The tensor is read once, in blocks: for each row the first allowed key, one past the last, and how
many there are; for each key whether anybody attends to it. A mask of a known kind that allows all
of that, and as many keys in each row, is the same mask: nothing dense is made to compare with.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.errors import check_bias, check_broadcast
from regard.masks import Causal, Documents, Keep, Mask, Padding, PrefixLM, SlidingWindow

__all__ = ["FAR", "recognised", "split"]

FAR = -32768.0
"""A score lowered by this much has weight 0 in every dtype, unless scores exceed 16,000."""

_AT_ONCE = 2**20
_SHORT = 2**16  # numbers; the masks of single queries, and of all of a short text
_WORD = 8  # bytes of an int64, in which bools are read


def recognised(mask: Tensor, shape: torch.Size) -> Mask | None:
    """The mask that a bool tensor is, exactly; None where everything is allowed.

    Causal, SlidingWindow, Padding, PrefixLM, Documents and what ``&`` makes of them are found,
    whichever of them it takes; anything else is a Keep of the tensor itself, without the axes
    along which it repeats.

    Args:
        mask: bool, True = may attend, broadcastable to the shape.
        shape: of the matrix, (..., num_heads, q_len, kv_len).

    Returns:
        A mask fitted to the shape. Keep holds a view of the tensor.

    Raises:
        ValueError: the tensor does not broadcast to the shape.

    Example:
        >>> import torch
        >>> real = torch.tensor([[False, True, True, True], [True, True, True, True]])
        >>> mask = torch.ones(4, 4, dtype=torch.bool).tril() & real[:, None, None, :]
        >>> recognised(mask, torch.Size((2, 9, 4, 4)))
        Causal() & Keep((2, 1, 1, 4))
    """
    mask = check_broadcast("mask", mask.detach(), shape, mask.device)
    return _MEMORY.answer(mask, shape, _recognise)[0]


def split(attn_mask: Tensor, shape: torch.Size) -> tuple[Mask | None, Tensor | None]:
    """An additive mask as a mask and a bias that together do exactly what it does.

    Where it is 0 or very negative (-inf, the least number of a dtype), it is a mask. A row that is
    very negative everywhere, by the same finite number, masks nothing: the softmax takes no notice
    of what it is given alike. Such rows are allowed again, and a bias of one number a row, which
    rounds their scores as the model's did, goes with them. Other numbers are a bias, beside a mask
    where that is of a known kind, so that its work is skipped.

    Args:
        attn_mask: numbers added to the scores, broadcastable to the shape.
        shape: of the matrix, (..., num_heads, q_len, kv_len).

    Returns:
        The mask, fitted to the shape, and the bias; None where there is none.

    Raises:
        TypeError: not a floating tensor.
        ValueError: it does not broadcast to the shape.

    Example:
        >>> import torch
        >>> least = torch.finfo(torch.float32).min
        >>> split(torch.full((3, 3), least).triu(1), torch.Size((2, 3, 3)))
        (Causal(), None)
    """
    numbers = cast(Tensor, check_bias(attn_mask.detach(), shape, attn_mask))
    return _MEMORY.answer(numbers, shape, _divide)


def _recognise(mask: Tensor, shape: torch.Size) -> "_Answer":
    dense = _distinct(mask)
    known = _known(_Facts.of(dense.shape, lambda rows: dense[..., rows, :]), shape)
    if known is None:
        part = _unrepeated(dense)
        return _Answer(lambda mask: (Keep(_distinct(mask)[part]), None))
    joined = _joined(known, shape, mask.device)
    return _Answer(lambda _: (joined, None))


def _divide(numbers: Tensor, shape: torch.Size) -> "_Answer":
    dense = _distinct(numbers)
    read = _Additive(dense)
    facts = _Facts.of(dense.shape, read.allowed)
    least, most = torch.cat(read.least, -1), torch.cat(read.most, -1)
    dead = facts.count == 0
    known = _known(facts, shape)
    if bool((most.isnan() | (dead & (least != most))).any()) or not (known or read.plain):
        return _Answer(lambda numbers: (None, numbers))
    mask = _joined(known or [], shape, numbers.device)
    if known is None:
        allowed = torch.cat([read.allowed(rows) for rows in _tiles(dense.shape)], -2)
        mask = Keep(allowed[_unrepeated(allowed)])
    alike = (dead & (most > -torch.inf))[..., None]
    rows = None
    if mask is not None and bool(alike.any()):
        mask = (mask | Keep(alike)).bind(shape, numbers.device)
        rows = most[..., None].where(alike, 0)
    # A Keep is as long as the matrix: remembered, it would outlive the tensor it was made of.
    lasting, plain = known is not None, read.plain
    return _Answer(lambda numbers: (mask, rows if plain else numbers), lasting)


class _Additive:
    """What the numbers of an additive mask are, noted while its allowed keys are read.

    Attributes:
        plain: whether every number so far is 0 or very negative.
        least: the least number of each row, in the parts that were read.
        most: the greatest; NaN where the row has one.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self.plain = True
        self.least: list[Tensor] = []
        self.most: list[Tensor] = []

    def allowed(self, rows: slice) -> Tensor:
        """Which keys these rows may attend to."""
        tile = self._numbers[..., rows, :]
        self.least.append(tile.amin(-1))
        self.most.append(tile.amax(-1))
        allowed = tile > FAR
        self.plain = self.plain and torch.equal(allowed, tile == 0)
        return allowed


@dataclass(frozen=True, eq=False)
class _Facts:
    """What is known of the rows and keys of a dense mask, (..., q_len, kv_len).

    Attributes:
        first: the first allowed key of each row, (..., q_len); kv_len where there is none.
        stop: one past the last; 0 where there is none.
        count: how many there are.
        keys: whether anybody attends to a key, (..., kv_len).
    """

    first: Tensor
    stop: Tensor
    count: Tensor
    keys: Tensor

    @classmethod
    def of(cls, shape: torch.Size, allowed: Callable[[slice], Tensor]) -> "_Facts":
        """The facts of a mask that is read in blocks of rows."""
        parts = [cls._of_words(_words(allowed(rows)), shape[-1]) for rows in _tiles(shape)]
        first, stop, count = (
            torch.cat([getattr(part, name) for part in parts], -1)
            for name in ("first", "stop", "count")
        )
        return cls(first, stop, count, torch.stack([part.keys for part in parts]).any(0))

    @classmethod
    def _of_words(cls, words: Tensor, kv_len: int) -> "_Facts":
        some = (words != 0).byte()
        front = some.argmax(-1, keepdim=True)
        back = words.shape[-1] - 1 - some.flip(-1).argmax(-1, keepdim=True)
        head, tail = (words.gather(-1, at).view(torch.uint8) for at in (front, back))
        first = front.squeeze(-1) * _WORD + head.argmax(-1)
        stop = (back.squeeze(-1) + 1) * _WORD - tail.flip(-1).argmax(-1)
        # Each byte of a word counts for itself: up to 255 words add up without a carry.
        wide = cast(tuple[Tensor, ...], words.split(255, -1))
        count = torch.cat([part.sum(-1, keepdim=True) for part in wide], -1).view(torch.uint8)
        tall = cast(tuple[Tensor, ...], words.split(255, -2))
        keys = torch.stack([part.sum(-2) for part in tall], -2).view(torch.uint8).any(-2)
        total = count.sum(-1)
        none = total == 0
        first, stop = first.masked_fill(none, kv_len), stop.masked_fill(none, 0)
        return cls(first, stop, total, keys[..., :kv_len].bool())

    def differ(self, low: Tensor, high: Tensor, keys: Tensor | None) -> Tensor:
        """Where a row is not exactly the keys from low to high, those of ``keys`` alone."""
        kv_len = self.keys.shape[-1]
        low = low.clamp(0, kv_len).expand(self.count.shape)
        high = high.clamp(0, kv_len).expand(self.count.shape).maximum(low)
        count = high - low
        if keys is not None:
            before = torch.nn.functional.pad(keys.cumsum(-1), (1, 0))
            count = before.gather(-1, high) - before.gather(-1, low)
        return (self.first < low) | (self.stop > high) | (self.count != count)


def _known(facts: _Facts, shape: torch.Size) -> list[Mask] | None:
    """The masks that must all allow; none of them: everything is allowed. None: no known kind."""
    q_len, kv_len = shape[-2:]
    some = facts.count > 0
    if facts.keys.shape[-1] < kv_len:  # one number stands for all keys of a row
        return [] if bool(some.all()) else [Keep(some[..., None])]
    rows = torch.Size((*facts.count.shape[:-1], q_len))
    first, stop, count = (t.expand(rows) for t in (facts.first, facts.stop, facts.count))
    facts = _Facts(first, stop, count, facts.keys)
    for kinds, by_rows, by_keys in product((_along, _packed), (False, True), (False, True)):
        for masks, low, high in kinds(facts, kv_len - q_len):
            wrong = facts.differ(low, high, facts.keys if by_keys else None)
            if by_rows:
                wrong &= facts.count > 0
            if not bool(wrong.any()):
                keys = [_of_keys(facts.keys)] if by_keys else []
                return [*masks, *keys, *([Keep(_narrowed(some[..., None]))] if by_rows else [])]
    return None


_Kinds = Iterator[tuple[list[Mask], Tensor, Tensor]]
"""Masks that a dense one may be, and the keys that each row has in them: from low to high."""


def _along(facts: _Facts, shift: int) -> _Kinds:
    """Bands along the diagonal, and prefixes."""
    q_len, kv_len = facts.count.shape[-1], facts.keys.shape[-1]
    place = torch.arange(q_len, device=facts.count.device)
    position, zero = place + shift, torch.zeros_like(place)
    yield [], zero, zero + kv_len
    yield [Causal()], zero, position + 1
    if shift:
        yield [Causal(align="top-left")], zero, place + 1
    left, right = _reach(facts, position)
    yield [SlidingWindow(left, right)], position - left, position + right + 1
    prefix = facts.stop[..., :1]
    yield [PrefixLM(_narrowed(prefix[..., None]))], zero, prefix.maximum(position + 1)


def _packed(facts: _Facts, shift: int) -> _Kinds:
    """Documents; a query before the first key would belong to none."""
    if shift < 0:
        return
    position = torch.arange(facts.count.shape[-1], device=facts.count.device) + shift
    ids, low, high = _documents(facts, shift)
    documents = Documents(_narrowed(ids[..., None, :]))
    yield [documents], low, high
    yield [documents, Causal()], low, high.minimum(position + 1)
    left, right = _reach(facts, position)
    low, high = low.maximum(position - left), high.minimum(position + right + 1)
    yield [documents, SlidingWindow(left, right)], low, high


def _reach(facts: _Facts, position: Tensor) -> tuple[int, int]:
    """How far any query attends, back and ahead."""
    back, ahead = position - facts.first, facts.stop - 1 - position
    some = facts.count > 0
    return int(back.where(some, 0).max().clamp(min=0)), int(ahead.where(some, 0).max().clamp(min=0))


def _documents(facts: _Facts, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest documents that nobody looks out of: ids, and low and high of each row."""
    kv_len = facts.keys.shape[-1]
    first = torch.nn.functional.pad(facts.first, (shift, 0), value=kv_len)  # (..., kv_len)
    stop = torch.nn.functional.pad(facts.stop, (shift, 0))
    place = torch.arange(kv_len, device=first.device)
    later = first.flip(-1).cummin(-1).values.flip(-1)  # of the rows here and after
    before = torch.nn.functional.pad(stop.cummax(-1).values, (1, -1))  # of the rows before
    starts = (later >= place) & (before <= place)
    starts[..., 0] = True
    ids = starts.cumsum(-1) - 1
    low = place.where(starts, 0).cummax(-1).values
    ends = torch.nn.functional.pad(place.where(starts, kv_len), (0, 1), value=kv_len)[..., 1:]
    high = ends.flip(-1).cummin(-1).values.flip(-1)
    return ids, low[..., shift:], high[..., shift:]


def _of_keys(keys: Tensor) -> Mask:
    """The mask of keys that are allowed to all queries, (..., kv_len)."""
    lengths = keys.sum(-1, keepdim=True)
    prefix = bool((keys == (torch.arange(keys.shape[-1], device=keys.device) < lengths)).all())
    return Padding(_narrowed(lengths[..., None])) if prefix else Keep(_narrowed(keys[..., None, :]))


def _joined(masks: list[Mask], shape: torch.Size, device: torch.device) -> Mask | None:
    if not masks:
        return None
    joined = masks[0]
    for mask in masks[1:]:
        joined &= mask
    return joined.bind(shape, device)


def _tiles(shape: torch.Size) -> list[slice]:
    """Blocks of rows."""
    height = max(1, _AT_ONCE * shape[-2] // shape.numel())
    starts = range(0, shape[-2], height)
    return [slice(start, min(start + height, shape[-2])) for start in starts]


def _words(allowed: Tensor) -> Tensor:
    """Bools of shape (..., n) as int64, eight in one, (..., n / 8) rounded up; a view if it can."""
    *leading, length = allowed.shape
    whole = length % _WORD == 0 and allowed.storage_offset() % _WORD == 0
    if not (whole and allowed.is_contiguous()):
        padded = allowed.new_zeros(*leading, -(-length // _WORD) * _WORD)
        padded[..., :length] = allowed
        allowed = padded
    return allowed.view(torch.int64)


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor with an axis of 1 in place of one that was expanded."""
    return tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())]


def _unrepeated(tensor: Tensor) -> tuple[slice, ...]:
    """Where the tensor lies without the leading axes along which it repeats."""
    index = [slice(None)] * tensor.ndim
    for axis in range(tensor.ndim - 2):
        part = tensor[tuple(index)]
        others = range(1, part.shape[axis])
        if all(torch.equal(part.select(axis, 0), part.select(axis, i)) for i in others):
            index[axis] = slice(0, 1)
    return tuple(index)


def _narrowed(tensor: Tensor) -> Tensor:
    """A copy without the leading axes along which the tensor repeats."""
    return tensor[_unrepeated(tensor)].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class _Answer:
    """What a tensor was found to be.

    Attributes:
        of: the answer, given the tensor: what is remembered holds no tensor of the model.
        lasting: whether it may be remembered.
    """

    of: Callable[[Tensor], tuple[Mask | None, Tensor | None]]
    lasting: bool = True


class _Memory:
    """The last few tensors and what they were: layers share masks. It keeps no long one alive."""

    def __init__(self) -> None:
        self._entries: deque[tuple[StorageWeakRef, tuple[object, ...], _Answer]] = deque(maxlen=4)
        self._short: deque[tuple[Tensor, tuple[object, ...], _Answer]] = deque(maxlen=4)

    def answer(
        self, tensor: Tensor, shape: torch.Size, find: Callable[[Tensor, torch.Size], _Answer]
    ) -> tuple[Mask | None, Tensor | None]:
        """What the tensor is, found once while it stays as it is."""
        with torch.inference_mode(False):  # what is kept can meet autograd later
            distinct = _distinct(tensor)
            if distinct.numel() <= _SHORT:
                return self._of_short(distinct, shape, lambda: find(tensor, shape)).of(tensor)
            if tensor.is_inference():  # PyTorch does not count its changes
                return find(tensor, shape).of(tensor)
            storage = StorageWeakRef(tensor.untyped_storage())
            layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            state = (shape, *layout, tensor._version)
            for kept, its_state, answer in list(self._entries):
                if kept == storage and its_state == state:
                    return answer.of(tensor)
            answer = find(tensor, shape)
            if answer.lasting:
                self._entries.append((storage, state, answer))
            return answer.of(tensor)

    def _of_short(self, tensor: Tensor, shape: torch.Size, find: Callable[[], _Answer]) -> _Answer:
        """By what it holds: to compare takes far less than to find."""
        kind = (shape, tensor.shape, tensor.dtype, tensor.device)
        for kept, its_kind, answer in list(self._short):
            if its_kind == kind and torch.equal(kept, tensor):
                return answer
        answer = find()
        self._short.append((tensor.clone(), kind, answer))
        return answer


_MEMORY = _Memory()
