"""Tilings of weights @ value into calls of the fused kernel.

The only mask that saves the kernel work is its own causal mask; a mask tensor saves none. A tiling
therefore covers the visible part of the matrix with boxes, and passes a mask tensor only for boxes
that need one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product as every_choice
from math import prod

import torch
from torch import Tensor

from regard.backends.backend import Between
from regard.backends.sdpa_calls import Call, Parts, Product, fused_attention, in_calls, widened
from regard.masks import And, Causal, Keep, Mask
from regard.scores.box import Box

# Up to this number of scores per batch entry, one call with a mask is faster than several without.
SMALL = 2**18
# Rows per tile: enough for a fast kernel, few enough to skip hidden keys; fewer if every head has a
# large mask of its own.
MIN_TILE, MAX_TILE, TILE_SIZE = 64, 256, 2**25
# Wider bands are as fast in tiles. The blocks of a fold have up to a quarter as many rows as the
# band is wide, within these bounds.
WIDEST_FOLD, MIN_FOLD, MAX_FOLD = 1024, 32, 256
# The kernel is fastest if the number of columns is a multiple of its vector width.
VECTOR = 16


@dataclass(frozen=True)
class _Fold:
    """Rows of a band mask, cut into equal blocks that one call takes as a batch.

    Block i has the rows from ``first_row + i * height`` and the columns from
    ``first_column + i * height``: views of query, key and value, and one small mask for all.
    """

    first_row: int
    first_column: int
    count: int
    height: int
    width: int

    @property
    def rows(self) -> slice:
        """All rows of the fold."""
        return slice(self.first_row, self.first_row + self.count * self.height)

    def box(self, place: int, leading: tuple[slice, ...]) -> Box:
        """Return one of the blocks."""
        row, column = (start + place * self.height for start in (self.first_row, self.first_column))
        return Box(leading, slice(row, row + self.height), slice(column, column + self.width))

    def attend(self, product: Product) -> Tensor:
        """Compute the rows of weights @ value, (..., num_heads, rows, value_dim)."""
        leading = product.shape[:-2]
        # Flattening the leading axes keeps heads that share a key next to each other.
        query, key, value = (
            tensor.reshape(-1, *tensor.shape[-2:]) for tensor in widened(product.tensors)
        )
        query = query[:, self.rows].unflatten(1, (self.count, self.height)).transpose(0, 1)
        parts = Parts(query, self._overlapping(key), self._overlapping(value))
        alike = self.box(0, tuple(slice(0, 1) for _ in leading))
        mask = product.extra(Call(alike, "some"))
        output = fused_attention(parts, product.source.scale, mask)
        output = output[..., : product.value.shape[-1]].transpose(0, 1).flatten(1, 2)
        return output.reshape(*leading, *output.shape[1:])

    def _overlapping(self, tensor: Tensor) -> Tensor:
        """Return (heads, kv_len, dim) as overlapping views, (count, heads, width, dim)."""
        blocks = tensor[:, self.first_column :].unfold(1, self.width, self.height)
        return blocks[:, : self.count].mT.transpose(0, 1)


@dataclass(frozen=True)
class Form:
    """One way to compute weights @ value with the fused kernel.

    Attributes:
        how: a description for ``explain``.
        calls: boxes that are multiplied one by one, in the order of their rows.
        fold: rows that are multiplied in one call, after the calls on the rows above.
    """

    how: str
    calls: list[Call]
    fold: _Fold | None = None

    def attend(self, product: Product, between: Between) -> Tensor:
        """Compute weights @ value, (..., num_heads, q_len, value_dim)."""
        if self.fold is None:
            return in_calls(product, self.calls, between)
        above = [call for call in self.calls if call.box.rows.start < self.fold.first_row]
        below = self.calls[len(above) :]
        parts: list[Tensor] = []
        for call in (*above, None, *below):
            between(len(parts), len(self.calls) + 1)
            parts.append(self.fold.attend(product) if call is None else product.rows(call))
        between(len(parts), len(parts))
        # The kernel stores the heads of a row together; joining along the rows keeps this order.
        return torch.cat([part.movedim(-2, 0) for part in parts]).movedim(0, -2)

    def mask_bytes(self, product: Product) -> int:
        """Return the bytes of the largest mask of a call: its bools, and these as numbers."""
        calls = [call for call in self.calls if call.hides == "some"]
        if not calls:
            return 0
        mask = product.extra(max(calls, key=lambda call: prod(call.box.size)))
        return 0 if mask is None else mask.numel() * (1 + product.value.itemsize)


def form_of(product: Product) -> Form:
    """Return the first form in the table that fits."""
    return next(form for choice in FORMS if (form := choice(product)) is not None)


def _one_call(product: Product) -> Form | None:
    mask, shape = product.mask, product.shape
    *leading, rows, columns = (slice(0, n) for n in shape)
    box = Box(tuple(leading), rows, columns)
    if mask is None:
        return Form("one fused call", [Call(box, "nothing")])
    if _is_kernels_causal(product, mask):
        return Form("one fused causal call", [Call(box, "future")])
    call = _call(mask, box.leading, rows, shape)
    if call.hides == "nothing":
        return Form("one fused call", [call])
    of_keys = isinstance(mask, Keep) and mask.mask.shape[-2] == 1
    if of_keys or prod(shape[-3:]) <= SMALL:
        return Form("one fused call with a mask", [call])
    return None


def _by_sequence(product: Product) -> Form | None:
    """Compute each sequence with only the keys that all its queries attend to.

    This is the form for padding, alone or combined with the causal mask.
    """
    mask, shape = product.mask, product.shape
    assert mask is not None
    causal = [m for m in _parts_of(mask) if _is_kernels_causal(product, m)]
    others = [m for m in _parts_of(mask) if m not in causal]
    if not others:
        return None
    calls = list(_calls(reduce(And, others), shape, slice(0, shape[-2])))
    starts = max(call.box.columns.start for call in calls)
    if any(call.hides == "some" for call in calls) or (causal and starts):
        return None
    calls = [call._replace(hides="future") for call in calls] if causal else calls
    return Form(f"{_calls_text(calls)}, each on the keys of its sequences", calls)


def _folded(product: Product) -> Form | None:
    """Fold a narrow band: equal blocks in one call, the ragged ends separately."""
    mask, (q_len, kv_len) = product.mask, product.shape[-2:]
    assert mask is not None
    limits = mask.limits(product.shape)
    if limits is None or not limits.is_band:
        return None
    low, high = limits.low, limits.high
    if low is None or high is None or not 0 <= high - low < WIDEST_FOLD:
        return None
    if product.source.bias is not None:
        return None
    height = max(MIN_FOLD, min(MAX_FOLD, 1 << ((high - low) // 8).bit_length()))
    width = -(-(height + high - low) // VECTOR) * VECTOR
    shift = height + high - width  # from the first row of a block to its first column
    first_row = max(0, -shift)
    first_column = first_row + shift
    count = min((q_len - first_row) // height, (kv_len - first_column - width) // height + 1)
    if count < 2:
        return None
    fold = _Fold(first_row, first_column, count, height, width)
    heads = tuple(slice(0, n) for n in product.shape[:-2])  # a band is the same for all of them
    ends = (range(first_row), range(fold.rows.stop, q_len))
    tiles = [rows for end in ends for rows in _tiles_of(end, MAX_TILE)]
    calls = [_call(mask, heads, rows, product.shape) for rows in tiles]
    how = f"one fused call for {count} blocks of {height} rows x {width} keys along the band"
    return Form(how, calls, fold)


def _in_tiles(product: Product) -> Form:
    """Cut the rows into tiles, each with the columns that it attends to."""
    calls = _tile_calls(product, range(product.shape[-2]))
    return Form(f"{_calls_text(calls)}, each on some rows and the keys that they see", calls)


FORMS: tuple[Callable[[Product], Form | None], ...] = (_one_call, _by_sequence, _folded, _in_tiles)


def _is_kernels_causal(product: Product, mask: Mask) -> bool:
    """Return True if a mask is the causal mask of the kernel, which is top-left.

    The kernel masks with -inf before it scales, which is wrong for a scale of 0 or below. With its
    causal mask it takes no bias.
    """
    usual = product.source.scale > 0 and product.source.bias is None
    return usual and isinstance(mask, Causal) and mask.band(product.shape) == (None, 0)


def _parts_of(mask: Mask) -> list[Mask]:
    """Return the masks that ``&`` combines in this mask; all of them must allow a key."""
    if isinstance(mask, And):
        return [*_parts_of(mask.first), *_parts_of(mask.second)]
    return [mask]


def _tile_calls(product: Product, rows: range) -> list[Call]:
    mask, shape = product.mask, product.shape
    assert mask is not None
    height = max(MIN_TILE, min(MAX_TILE, TILE_SIZE // prod((*shape[-3:-2], shape[-1]))))
    return [call for tile in _tiles_of(rows, height) for call in _calls(mask, shape, tile)]


def _tiles_of(rows: range, height: int) -> list[slice]:
    return [slice(start, min(start + height, rows.stop)) for start in rows[::height]]


def _calls(mask: Mask, shape: torch.Size, rows: slice) -> Iterator[Call]:
    """Yield the calls for these rows; neighbouring batch entries with equal columns share one."""
    heads = tuple(slice(0, n) for n in shape[-3:-2])
    if len(shape) < 4:
        yield _call(mask, heads, rows, shape)
        return
    *outer, entries = shape[:-3]
    room = max(1, TILE_SIZE // prod((shape[-3], rows.stop - rows.start, shape[-1])))
    for place in every_choice(*(range(n) for n in outer)):
        at = tuple(slice(i, i + 1) for i in place)
        alone = [_call(mask, (*at, slice(i, i + 1), *heads), rows, shape) for i in range(entries)]
        start = 0
        for stop in range(1, entries + 1):
            box, hides = alone[start]
            full = hides == "some" and stop - start == room
            if stop == entries or full or not _alike(alone[start], alone[stop]):
                yield Call(box._replace(leading=(*at, slice(start, stop), *heads)), hides)
                start = stop


def _call(mask: Mask, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Call:
    """Return a call for these rows and the columns that any of them attends to."""
    some, every = mask.key_bounds(leading, rows, shape)
    if some.start >= some.stop:  # rows without keys still have an answer
        return Call(Box(leading, rows, slice(0, 1)), "some")
    covered = every.start <= some.start and some.stop <= every.stop
    return Call(Box(leading, rows, some), "nothing" if covered else "some")


def _alike(first: Call, second: Call) -> bool:
    return (first.box.columns, first.hides) == (second.box.columns, second.hides)


def _calls_text(calls: list[Call]) -> str:
    return "one fused call" if len(calls) == 1 else f"{len(calls)} fused calls"
