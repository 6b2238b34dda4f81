"""Masks as bits, in squares of queries and keys, for kernels that skip squares.

A mask that has no limits by position is evaluated once for a matrix, some rows at a time. A square
in which no query may attend to a key is skipped, one in which all may attend to all needs no bits,
and only the others keep them: a bit for each pair of a query and a key. A mask of at most 64 MiB of
bits keeps those of all squares, because the CPU would wait for the GPU to count the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks import And, Mask, Or
from regard.scores.box import Box

SIDE = 64  # tokens on each side of a square
WHOLE, HIDDEN = -1, -2  # squares without bits
_BYTES_AT_ONCE = 2**28
_WORDS_AT_ONCE = 2**24  # 64 MiB; of more, partial squares are taken
_GATHER_BITS = 0x0102040810204080  # bit i of the highest byte of the product is byte i


class TileLists(NamedTuple):
    """The tiles that each program reads, with their numbers rising.

    Attributes:
        entries: int32, (batch or 1, heads or 1, programs, tiles): twice the number of a tile, plus
            1 where the bits of its squares decide; those after ``counts`` mean nothing.
        counts: int32, (batch or 1, heads or 1, programs).
    """

    entries: Tensor
    counts: Tensor


_Name = tuple[
    str, int, int, int
]  # whose tiles are listed, rows and keys of a tile, heads of a group


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The bits of a mask.

    Attributes:
        slots: int32, (batch or 1, num_heads or 1, row squares, column squares): where the bits
            of a square stand in ``words``, WHOLE or HIDDEN.
        words: int32, (places, SIDE, SIDE / 32): bit i of a word is the i-th of its 32 keys.
        lengths: q_len and kv_len.
    """

    slots: Tensor
    words: Tensor
    lengths: tuple[int, int]
    _lists: dict[_Name, TileLists] = field(default_factory=dict[_Name, TileLists], repr=False)

    def by_rows(self, height: int, width: int, group: int = 1) -> TileLists:
        """List the tiles of keys for each tile of rows.

        Args:
            height: rows of a tile: of all heads of a group, packed, where group is above 1.
            width: keys of a tile.
            group: how many query heads share a key head.
        """

        def rows() -> Tensor:
            first, stop = _tiles(self.lengths[0] * group, height)
            return torch.stack((first // group, (stop - 1) // group + 1))

        return self._listed(("rows", height, width, group), rows, width, group)

    def by_keys(self, height: int, width: int) -> TileLists:
        """List the tiles of ``height`` queries for each tile of ``width`` keys."""
        return self._listed(
            ("keys", height, width, 1), lambda: _tiles(self.lengths[0], height), width, 1
        )

    def _listed(self, name: _Name, rows: Callable[[], Tensor], width: int, group: int) -> TileLists:
        if name not in self._lists:
            columns = _tiles(self.lengths[1], width)
            self._lists[name] = self._list(rows(), columns, group, turned=name[0] == "keys")
        return self._lists[name]

    def _list(self, rows: Tensor, columns: Tensor, group: int, *, turned: bool) -> TileLists:
        flags = torch.stack((self.slots == HIDDEN, self.slots == WHOLE))
        if group > 1 and self.slots.shape[1] > 1:
            flags = _unflattened(flags, 2, (-1, group)).all(3)
        for axis, tiles in ((-2, rows), (-1, columns)):
            flags = _of_tiles(flags, axis, tiles).all(axis)
        hidden, whole = flags.mT if turned else flags
        order = hidden.byte().sort(dim=-1, stable=True).indices
        partial = whole.logical_not().gather(-1, order)
        entries = (2 * order + partial).int().contiguous()
        counts = hidden.logical_not().sum(-1, dtype=torch.int32)
        return TileLists(entries, counts.contiguous())


def _tiles(length: int, size: int) -> Tensor:
    """Return the first and one past the last token of each tile, (2, tiles)."""
    starts = torch.arange(0, length, size, device="cpu")
    return torch.stack((starts, (starts + size).clamp(max=length)))


def _of_tiles(flags: Tensor, axis: int, tiles: Tensor) -> Tensor:
    """Return the flags of the squares of each tile, with an axis of squares before ``axis``.

    The new axis stands at ``axis``; tiles that meet fewer squares repeat their last one.
    """
    first, last = tiles[0] // SIDE, (tiles[1] - 1) // SIDE
    squares = first + torch.arange(int((last - first).max()) + 1, device="cpu")[:, None]
    index = torch.minimum(squares, last).to(flags.device, non_blocking=True)  # (squares, tiles)
    taken = flags.index_select(axis, index.flatten())
    return _unflattened(taken, axis, index.shape).transpose(axis, axis - 1)


def _unflattened(tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    return cast(Any, tensor).unflatten(axis, sizes)  # PyTorch leaves its type open


def pack(mask: Mask, shape: torch.Size, device: torch.device) -> PackedMask:
    """Evaluate a mask that is bound to a matrix of this shape, of at most four axes."""
    *leading, q_len, kv_len = shape
    probe = mask.block(
        Box(tuple(slice(0, n) for n in leading), slice(0, 1), slice(0, 1)), shape, device
    )
    varied = [max(1, n) for n in (1,) * (len(shape) - probe.ndim) + probe.shape[:-2]]
    across = -(-kv_len // SIDE)
    # A number takes a byte in each of two masks and in what joins them, or in one and its bits.
    at_once = _BYTES_AT_ONCE // (3 if isinstance(mask, And | Or) else 2)
    height = max(1, at_once // (across * SIDE * SIDE)) * SIDE
    parts: list[Tensor] = []
    slots: list[Tensor] = []
    words: list[Tensor] = []
    for part in product(*(range(n) for n in varied)):
        for start in range(0, q_len, height):
            rows = slice(start, min(start + height, q_len))
            box = Box(tuple(slice(at, at + 1) for at in part), rows, slice(0, kv_len))
            parts.append(_bits(mask.block(box, shape, device), rows.stop - start, kv_len))
            if sum(part.numel() for part in parts) > _WORDS_AT_ONCE:
                _place(parts, slots, words)
    _place(parts, slots, words, counted=bool(words))
    size = (1, 1, *varied)[-2:]
    of_all = torch.cat(slots).view(*size, -1, across)
    return PackedMask(of_all, torch.cat(words), (q_len, kv_len))


def _place(
    parts: list[Tensor], slots: list[Tensor], words: list[Tensor], *, counted: bool = True
) -> None:
    """Empty the parts: append what each square has in ``slots``, and the words of partial squares.

    To count those, the CPU waits for the GPU. If they are not counted, all squares keep words.
    """
    if not parts:
        return
    bits = torch.cat(parts)
    parts.clear()
    some, every = (bits != 0).any(-1).any(-1), (bits == -1).all(-1).all(-1)
    partial = some & ~every
    kept = partial if counted else torch.ones_like(partial)
    numbers = kept.flatten().cumsum(0).view_as(kept) - 1 + sum(map(len, words))
    slots.append(torch.where(every, WHOLE, torch.where(some, numbers, HIDDEN)).int())
    words.append(bits[partial] if counted else bits.flatten(0, 1))


def _bits(allowed: Tensor, rows: int, kv_len: int) -> Tensor:
    """Return a mask as int32 words, (row squares, column squares, SIDE, SIDE / 32)."""
    flags = allowed.expand(*allowed.shape[:-2], rows, kv_len).reshape(rows, kv_len)
    if kv_len % SIDE or rows % SIDE:
        flags = pad(flags, (0, -kv_len % SIDE, 0, -rows % SIDE))
    eights = (
        flags.view(torch.int64) if flags.is_contiguous() else flags.contiguous().view(torch.int64)
    )
    packed = (eights * _GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8).view(torch.int32)
    squares = packed.view(-1, SIDE, packed.shape[-1] * 32 // SIDE, SIDE // 32)
    return squares.transpose(1, 2)
