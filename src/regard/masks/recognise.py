"""Recognition of dense masks, which models pass as bool tensors or as float tensors of 0 and -inf.

The allowed keys are found in one pass, in blocks of rows. The pass records the first allowed key,
the last one and their number for each row, and for each key whether any query attends to it. A mask
of a known kind equals the dense mask if each of its rows covers the recorded keys and allows the
same number of keys. The comparison forms no second dense mask.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import check_bias, check_broadcast
from regard.masks import Causal, Documents, Keep, Mask, Padding, PrefixLM, SlidingWindow
from regard.masks.checksums import row_checksums
from regard.masks.mask import without_repeats
from regard.scores.box import Box

FAR = -32768.0
"""A score lowered by this much has weight 0 in every dtype, unless scores exceed 16,000."""

_Parts: TypeAlias = tuple[Mask | None, Tensor | None]
"""A mask and a bias, each None where there is none."""

_MAX_NUMBERS = 2**20  # read at once
_SHORT = 2**16  # elements; masks of single queries or of a short text have fewer


def recognised(mask: Tensor, shape: torch.Size) -> Mask | None:
    """Return a mask equal to a bool tensor, or None if every key is allowed.

    A tensor is recognised as Causal, SlidingWindow, PrefixLM or Documents, or as Documents combined
    with Causal or SlidingWindow. A mask of the keys (Padding or Keep) and a mask of the queries
    (Keep) are recognised alone and combined with these masks. Any other tensor becomes a Keep
    without the leading axes along which the tensor repeats.

    Args:
        mask: bool, True = may attend, broadcastable to the shape.
        shape: of the matrix, (..., num_heads, q_len, kv_len).

    Returns:
        A mask bound to the shape. The mask of an unrecognised tensor is a view of that tensor.

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
    return _remembered(mask, shape, _recognise)[0]


def allowed_rows(mask: Mask | None, rows: slice, shape: torch.Size, device: torch.device) -> Tensor:
    """Return True for each key that some rows may attend to, (..., rows, kv_len).

    The leading axes have their full size or 1.

    Args:
        mask: a mask bound to the shape; None for all keys.
        rows: the rows.
        shape: of the matrix, (..., num_heads, q_len, kv_len).
        device: of the matrix.
    """
    if mask is None:
        block = torch.ones((), dtype=torch.bool, device=device)
    else:
        everywhere = tuple(slice(0, n) for n in shape)
        block = mask.block(Box(everywhere[:-2], rows, everywhere[-1]), shape, device)
    block = block[(None,) * (len(shape) - block.ndim)]
    return block.expand(*block.shape[:-2], rows.stop - rows.start, shape[-1])


def recognised_rows(
    allowed: Callable[[slice], Tensor], size: torch.Size, shape: torch.Size
) -> Mask | None:
    """Return a mask equal to rows that a function computes, or None if every key is allowed.

    The kinds are those of ``recognised``. The rows are computed in blocks. All of them are kept at
    once only if they are of no known kind.

    Args:
        allowed: returns the rows of a slice, (..., rows, kv_len); True = may attend.
        size: the shape of all rows together, broadcastable to the shape.
        shape: of the matrix, (..., num_heads, q_len, kv_len).

    Returns:
        A mask bound to the shape.

    Example:
        >>> import torch
        >>> rows = torch.ones(4, 4, dtype=torch.bool).tril()
        >>> shape = torch.Size((2, 4, 4))
        >>> recognised_rows(lambda some: rows[None, some], torch.Size((1, 4, 4)), shape)
        Causal()
    """
    facts = _Facts.of(size, allowed)
    known = _named_masks(facts, shape)
    mask = Keep(allowed(slice(0, size[-2]))) if known is None else _all_of(known)
    return None if mask is None else mask.bind(shape, facts.count.device)


def split(attn_mask: Tensor, shape: torch.Size) -> _Parts:
    """Return a mask and a bias that together do exactly what an additive mask does.

    The value 0 means an allowed key, and a very negative value (``FAR`` or less) a masked key. A
    row with the same very negative finite value at every key masks nothing, because the softmax
    ignores a number that is added to all scores. The mask allows all keys of such a row, and the
    bias keeps its value, so that the scores are rounded as in the model. If there are other
    values, the whole tensor is the bias, and a mask of a known kind is returned with it to save
    work. If there is a NaN, or a row whose values are all very negative but not all equal, the
    whole tensor is the bias and there is no mask.

    Args:
        attn_mask: numbers added to the scores, broadcastable to the shape.
        shape: of the matrix, (..., num_heads, q_len, kv_len).

    Returns:
        The mask, bound to the shape, and the bias; None where there is none.

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
    return _remembered(numbers, shape, _divide)


_Answer: TypeAlias = Callable[[Tensor], _Parts]
"""A function that returns the mask and bias of a tensor that was analysed before.

It keeps no reference to a tensor of the model.
"""

_MEMORY: deque[tuple[Tensor, tuple[object, ...], _Answer]] = deque(maxlen=8)


def _remembered(
    tensor: Tensor, shape: torch.Size, read: Callable[[Tensor, torch.Size], _Answer]
) -> _Parts:
    """Return the mask and bias of a tensor, from a cache if an equal tensor was analysed before.

    The layers of a model share masks, so recent answers are cached. A hit compares contents,
    because NumPy and ``.data`` change a tensor without PyTorch's notice. A small tensor is compared
    by its values, a larger one by a checksum of each row, a quarter of the analysis's time.
    """
    with torch.inference_mode(False):  # autograd may use the answer later
        dense = without_repeats(tensor)
        state = (shape, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        content = dense if dense.numel() <= _SHORT else row_checksums(dense)
        for kept, its_state, answer in list(_MEMORY):
            if its_state == state and torch.equal(kept, content):
                return answer(tensor)
        answer = read(tensor, shape)
        _MEMORY.append((content.clone(), state, answer))
        return answer(tensor)


def _recognise(mask: Tensor, shape: torch.Size) -> _Answer:
    dense = without_repeats(mask)
    known = _named_masks(_Facts.of(dense.shape, lambda rows: dense[..., rows, :]), shape)
    if known is None:
        part = _unrepeated(dense)
        return lambda mask: (Keep(without_repeats(mask)[part]), None)
    joined = _all_of(known)
    bound = None if joined is None else joined.bind(shape, mask.device)
    return lambda _: (bound, None)


def _divide(numbers: Tensor, shape: torch.Size) -> _Answer:
    dense = without_repeats(numbers)
    facts = _Facts.of(dense.shape, lambda rows: dense[..., rows, :] > FAR)
    least, most, dead = dense.amin(-1), dense.amax(-1), facts.count == 0
    zeros = dense.numel() - int(dense.count_nonzero())
    plain = zeros == int(facts.count.sum())  # every number is 0 or very negative
    known = _named_masks(facts, shape)
    if bool((most.isnan() | (dead & (least != most))).any()) or (known is None and not plain):
        return lambda numbers: (None, numbers)
    alike = (dead & (most > -torch.inf))[..., None]
    some_alike = bool(alike.any())
    rows = most[..., None].where(alike, 0) if some_alike else None

    def mask_of(masks: list[Mask]) -> Mask | None:
        mask = _all_of(masks)
        if mask is None:
            return None
        return (mask | Keep(alike) if some_alike else mask).bind(shape, alike.device)

    if known is None:  # a mask as large as the matrix is not kept in the cache
        part = _unrepeated(dense)
        return lambda numbers: (mask_of([Keep(without_repeats(numbers)[part] > FAR)]), rows)
    mask = mask_of(known)
    bias = None if mask is None else rows
    return lambda numbers: (mask, bias if plain else numbers)


@dataclass(frozen=True, eq=False)
class _Facts:
    """Summary of the rows and keys of a dense mask, (..., q_len, kv_len).

    Attributes:
        first: the first allowed key of each row, (..., q_len); kv_len if there is none.
        stop: one past the last allowed key; 0 if there is none.
        count: the number of allowed keys.
        keys: True for a key to which some query attends, (..., kv_len).
    """

    first: Tensor
    stop: Tensor
    count: Tensor
    keys: Tensor

    @classmethod
    def of(cls, shape: torch.Size, allowed: Callable[[slice], Tensor]) -> "_Facts":
        """Return the facts of a mask that is read in blocks of rows."""
        parts = [cls._of_rows(allowed(rows)) for rows in _tiles(shape)]
        first, stop, count = (
            torch.cat([getattr(part, name) for part in parts], -1)
            for name in ("first", "stop", "count")
        )
        return cls(first, stop, count, torch.stack([part.keys for part in parts]).any(0))

    @classmethod
    def _of_rows(cls, allowed: Tensor) -> "_Facts":
        kv_len, numbers = allowed.shape[-1], allowed.view(torch.uint8)  # argmax rejects bools
        count = allowed.sum(-1)
        none = count == 0
        first = numbers.argmax(-1).masked_fill(none, kv_len)
        stop = (kv_len - numbers.flip(-1).argmax(-1)).masked_fill(none, 0)
        return cls(first, stop, count, numbers.amax(-2) > 0)

    def differ(self, low: Tensor, high: Tensor, keys: Tensor | None) -> Tensor:
        """Return True for each row whose allowed keys differ from the range low to high.

        If ``keys`` is given, only the keys that are True in it belong to the range.
        """
        kv_len = self.keys.shape[-1]
        low = low.clamp(0, kv_len).expand(self.count.shape)
        high = high.clamp(0, kv_len).expand(self.count.shape).maximum(low)
        count = high - low
        if keys is not None:
            before = pad(keys.cumsum(-1), (1, 0))
            count = before.gather(-1, high) - before.gather(-1, low)
        return (self.first < low) | (self.stop > high) | (self.count != count)


def _named_masks(facts: _Facts, shape: torch.Size) -> list[Mask] | None:
    """Return masks whose conjunction is the dense mask, or None if it is of no known kind."""
    q_len, kv_len = shape[-2:]
    some = facts.count > 0
    if facts.keys.shape[-1] < kv_len:  # one number stands for all keys of a row
        return [] if bool(some.all()) else [Keep(some[..., None])]
    rows = torch.Size((*facts.count.shape[:-1], q_len))
    first, stop, count = (t.expand(rows) for t in (facts.first, facts.stop, facts.count))
    facts = _Facts(first, stop, count, facts.keys)
    for kinds, by_rows, by_keys in product(
        (_banded, _with_documents), (False, True), (False, True)
    ):
        for masks, low, high in kinds(facts, kv_len - q_len):
            wrong = facts.differ(low, high, facts.keys if by_keys else None)
            if by_rows:
                wrong &= facts.count > 0
            if not bool(wrong.any()):
                keys = [_key_mask(facts.keys)] if by_keys else []
                return [*masks, *keys, *([Keep(narrowed(some[..., None]))] if by_rows else [])]
    return None


_Kinds = Iterator[tuple[list[Mask], Tensor, Tensor]]
"""Candidate masks for a dense mask, and the key range of each row: low and high, exclusive."""


def _banded(facts: _Facts, shift: int) -> _Kinds:
    """Yield the candidates that have no documents: all keys, bands and prefixes."""
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
    yield [PrefixLM(narrowed(prefix[..., None]))], zero, prefix.maximum(position + 1)


def _with_documents(facts: _Facts, shift: int) -> _Kinds:
    """Yield candidates with documents; none if a query lies before the first key.

    Such a query belongs to no document.
    """
    if shift < 0:
        return
    position = torch.arange(facts.count.shape[-1], device=facts.count.device) + shift
    ids, low, high = _documents(facts, shift)
    documents = Documents(narrowed(ids[..., None, :]))
    yield [documents], low, high
    yield [documents, Causal()], low, high.minimum(position + 1)
    left, right = _reach(facts, position)
    low, high = low.maximum(position - left), high.minimum(position + right + 1)
    yield [documents, SlidingWindow(left, right)], low, high


def _reach(facts: _Facts, position: Tensor) -> tuple[int, int]:
    """Return how far back and how far ahead the queries attend at most."""
    back, ahead = position - facts.first, facts.stop - 1 - position
    some = facts.count > 0
    return int(back.where(some, 0).max().clamp(min=0)), int(ahead.where(some, 0).max().clamp(min=0))


def _documents(facts: _Facts, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids of the smallest documents that contain the keys of each row, and their ranges."""
    kv_len = facts.keys.shape[-1]
    first = pad(facts.first, (shift, 0), value=kv_len)  # (..., kv_len)
    stop = pad(facts.stop, (shift, 0))
    place = torch.arange(kv_len, device=first.device)
    later = first.flip(-1).cummin(-1).values.flip(-1)  # of the rows here and after
    before = pad(stop.cummax(-1).values, (1, -1))  # of the rows before
    starts = (later >= place) & (before <= place)
    starts[..., 0] = True
    ids = starts.cumsum(-1) - 1
    low = place.where(starts, 0).cummax(-1).values
    ends = pad(place.where(starts, kv_len), (0, 1), value=kv_len)[..., 1:]
    high = ends.flip(-1).cummin(-1).values.flip(-1)
    return ids, low[..., shift:], high[..., shift:]


def _key_mask(keys: Tensor) -> Mask:
    """Return the mask that allows these keys, (..., kv_len), to every query."""
    lengths = keys.sum(-1, keepdim=True)
    prefix = bool((keys == (torch.arange(keys.shape[-1], device=keys.device) < lengths)).all())
    return Padding(narrowed(lengths[..., None])) if prefix else Keep(narrowed(keys[..., None, :]))


def _all_of(masks: list[Mask]) -> Mask | None:
    """Return the mask that allows what all of them allow, or None if there are none."""
    return reduce(lambda first, second: first & second, masks) if masks else None


def _tiles(shape: torch.Size) -> list[slice]:
    """Return blocks of rows."""
    height = max(1, _MAX_NUMBERS * shape[-2] // shape.numel())
    starts = range(0, shape[-2], height)
    return [slice(start, min(start + height, shape[-2])) for start in starts]


def _unrepeated(tensor: Tensor) -> tuple[slice, ...]:
    """Return the index of a tensor that omits the leading axes along which the tensor repeats."""
    index = [slice(None)] * tensor.ndim
    for axis in range(tensor.ndim - 2):
        part = tensor[tuple(index)]
        if torch.equal(part, part.narrow(axis, 0, 1).expand_as(part)):
            index[axis] = slice(0, 1)
    return tuple(index)


def narrowed(tensor: Tensor) -> Tensor:
    """Return a copy without the leading axes along which the tensor repeats."""
    return tensor[_unrepeated(tensor)].clone(memory_format=torch.contiguous_format)
