"""The abstract class ``Mask`` and the combinations of masks by ``&``, ``|`` and ``~``.

True means *may attend* in every mask; ``Drop`` takes the opposite.

A mask is a small immutable value. ``bind`` checks it against the shape of a matrix and fits its
tensors to that shape. If ``q_len != kv_len``, most masks align the last query with the last key,
as with a KV cache. ``Causal(align="top-left")`` and ``MaskMod`` count from the first query.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import (
    DENSE_LIMIT,
    check_count,
    check_memory,
    check_whole,
    dtype_text,
    kind_text,
    shape_text,
    with_article,
)
from regard.scores.box import Box, broadcast_index, length, positions
from regard.scores.flex_callable import FlexCallable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.documents import Documents


PointMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask_mod: b, h, q_idx and kv_idx, each a scalar tensor; True = may attend."""

MaskLike: TypeAlias = "Mask | Tensor | PointMask | BlockMask"
"""Everything that can be passed as a mask."""

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The kinds of blocks in a BlockMask.

EMPTY: no query may attend to a key. PARTIAL: the mask_mod decides. FULL: all may attend to all.
"""

NO_KEYS = slice(0, 0)
_MAX_NUMBERS = 2**22  # of a mask, evaluated at once
_DRAWN_ROWS, _DRAWN_COLUMNS = 32, 64


class KeyBounds(NamedTuple):
    """Ranges of keys that bound a mask in some rows, found without evaluating every key.

    Backends skip the keys outside ``any`` and evaluate no mask inside ``all``.

    Attributes:
        any: a range that contains every key to which any of the rows may attend; may be empty.
        all: a range of keys to which all of the rows may attend; a part of ``any``, may be empty.

    Example:
        >>> import torch, regard
        >>> regard.Causal().key_bounds((), slice(2, 4), torch.Size((5, 5)))
        KeyBounds(any=slice(0, 4, None), all=slice(0, 3, None))
    """

    any: slice
    all: slice


class PositionLimits(NamedTuple):
    """A whole mask as limits by position: a key is visible if every limit allows it.

    Kernels of backends compare positions with these limits, instead of reading a mask.

    Attributes:
        low: the lowest kv_idx - q_idx; None for no limit.
        high: the highest kv_idx - q_idx; None for no limit.
        lengths: the number of keys of each sequence, with all axes of the matrix, each of full
            length or 1; None for no limit.
        documents: the ids of the keys' documents, which a query's aligned key must share; None for
            no limit.
        start: the position of the first query in the matrix that the documents belong to.
        q_len: the number of queries of that matrix.

    Example:
        >>> import torch, regard
        >>> (regard.Causal() & regard.SlidingWindow(2, 2)).limits(torch.Size((5, 5)))[:2]
        (-2, 0)
    """

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None
    documents: "Documents | None" = None
    start: int = 0
    q_len: int = 0

    @property
    def is_band(self) -> bool:
        """True if the same band is visible in all sequences."""
        return self.lengths is None and self.documents is None

    def joined(self, other: "PositionLimits") -> "PositionLimits | None":
        """Return the limits of both, or None if both have documents."""
        if self.documents is not None and other.documents is not None:
            return None
        lows = [each.low for each in (self, other) if each.low is not None]
        highs = [each.high for each in (self, other) if each.high is not None]
        lengths = [each.lengths for each in (self, other) if each.lengths is not None]
        documents = self if self.documents is not None else other
        return PositionLimits(
            max(lows, default=None),
            min(highs, default=None),
            torch.minimum(lengths[0], lengths[-1]) if lengths else None,
            *documents[3:],
        )


class Points(NamedTuple):
    """The pairs of a query and a key at which a mask is evaluated: a box of a matrix, or one pair.

    Attributes:
        places: one index for each axis of the matrix: slices for a box, scalar tensors for a pair.
        shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
        device: the device of the indices.
    """

    places: tuple[slice | Tensor, ...]
    shape: torch.Size
    device: torch.device

    @property
    def q_idx(self) -> Tensor:
        """The indices of the queries, (rows, 1), or a scalar tensor for one pair."""
        q_idx = self._indices(-2)
        return q_idx[:, None] if q_idx.ndim else q_idx

    @property
    def kv_idx(self) -> Tensor:
        """The indices of the keys, (columns,), or a scalar tensor for one pair."""
        return self._indices(-1)

    @property
    def position(self) -> Tensor:
        """The key index that each query is aligned with; the last query has the last key."""
        return self.q_idx + (self.shape[-1] - self.shape[-2])

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor with the axes of the matrix, each of full length or 1."""
        return broadcast_index(tensor, self.places)

    def _indices(self, axis: int) -> Tensor:
        at = self.places[axis]
        return at if isinstance(at, Tensor) else positions(at, self.device)


@dataclass(frozen=True, eq=False, repr=False)
class Mask(ABC):
    """The abstract class of masks, which define the keys that a query may attend to.

    Masks combine with ``&``, ``|`` and ``~``. A subclass is a frozen dataclass whose fields hold
    its tensors and the masks that it combines.

    The methods run on the calling thread. On a CPU they can run on several threads at once, which
    is faster: set ``thread_safe = True`` in the subclass. ``allows`` and ``key_bounds`` must then
    change only local variables.

    Attributes:
        thread_safe: True if the methods may run on several threads at once; False by default. A
            subclass does not inherit it.
        shape: the shape of the matrix, for the mask of a matrix (``A.mask``); otherwise None.
        device: the device of that matrix; otherwise None.

    Example:
        >>> import torch, regard
        >>> ~(regard.Causal() & regard.Padding([3, 5])) | regard.SlidingWindow(2, 2)
        ~(Causal() & Padding([3, 5])) | SlidingWindow(2, 2)
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x, mask=regard.Causal() | torch.tensor([0, 0, 1, 0]).bool()).mask
        Causal() | Keep((1, 4))
        4 x 4: queries down, keys across, ■ may attend
        ■ □ ■ □
        ■ ■ ■ □
        ■ ■ ■ □
        ■ ■ ■ ■
    """

    thread_safe: ClassVar[bool] = False

    shape: torch.Size | None = field(default=None, init=False, compare=False)
    device: torch.device | None = field(default=None, init=False, compare=False)

    @abstractmethod
    def bind(self, shape: torch.Size, device: torch.device) -> "Mask":
        """Return the mask fitted to a matrix of this shape, (..., num_heads, q_len, kv_len).

        Each tensor of a bound mask has as many axes as the matrix. Its leading axes have full
        length or length 1. Binding a bound mask to the same shape again changes nothing.

        Raises:
            ValueError: the mask does not fit the shape.
        """

    @abstractmethod
    def allows(self, points: Points) -> Tensor:
        """Return a bool tensor that broadcasts to the points, True where the query may attend.

        The mask must already be bound to the matrix that the points belong to.
        """

    @abstractmethod
    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        """Return bounds on the keys that some rows of a bound mask may attend to.

        The bounds are computed without evaluating every key.

        Args:
            leading: a slice with a start and a stop for each leading axis of the matrix.
            rows: the queries.
            shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
        """

    @property
    @abstractmethod
    def text(self) -> str:
        """The mask as Python code."""

    def limits(self, shape: torch.Size) -> PositionLimits | None:
        """Return limits by position that are the whole bound mask; None if there are none."""
        return None

    def rows(self, rows: range, q_len: int) -> "Mask":
        """Return the mask of some queries, for a matrix that has no others.

        Args:
            rows: neighbouring queries of the matrix that the mask is bound to.
            q_len: the number of queries of that matrix.

        Example:
            >>> import regard
            >>> regard.Causal().rows(range(1, 3), 4)
            RowSlice(Causal(), 1, 4)
        """
        from regard.masks.row_slice import RowSlice  # that module imports this one

        return self if rows == range(q_len) else RowSlice(self, rows.start, q_len)

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        """Return True where a bound mask allows a key of the box, broadcastable to the box."""
        return self.allows(Points(box.at_both, shape, device))

    def mask_mod(self, shape: torch.Size) -> PointMask:
        """Return FlexAttention's mask_mod of a mask bound to (batch, num_heads, q_len, kv_len)."""

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return self.allows(Points((b, h, q_idx, kv_idx), shape, q_idx.device))

        return mask_mod

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the mask with the function applied to each of its tensors."""

        def changed(value: object) -> object:
            if isinstance(value, Mask | FlexCallable):
                return value.map(function)
            return function(value) if isinstance(value, Tensor) else value

        return self._copy({name: changed(value) for name, value in self._fields().items()})

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a bound mask, except those that a mask_mod uses."""
        found: list[Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)
        return found

    @property
    def runs_on_threads(self) -> bool:
        """True if this mask and all masks that it combines are thread-safe."""
        masks = [value for value in self._fields().values() if isinstance(value, Mask)]
        safe = vars(type(self)).get("thread_safe", False)
        return safe and all(mask.runs_on_threads for mask in masks)

    def of_matrix(self, shape: torch.Size, device: torch.device) -> Self:
        """Return the bound mask with the shape and the device of its matrix."""
        return self._copy({**vars(self), "shape": shape, "device": device})

    def to_dense(
        self, *shape: int, device: torch.device | str = "cpu", limit: int | None = DENSE_LIMIT
    ) -> Tensor:
        """Return the whole mask as a bool tensor, True = may attend.

        Args:
            shape: (..., num_heads, q_len, kv_len) or (q_len, kv_len). The mask of a matrix,
                ``A.mask``, has its shape and device already.
            device: the device of the result, for a mask that is not the mask of a matrix.
            limit: the maximum number of bytes, 4 GiB by default; None for no limit.

        Raises:
            ValueError: the shape is missing, or the mask does not fit it.
            MemoryError: the result would take more than the limit.

        Example:
            >>> import regard
            >>> regard.Causal().to_dense(2, 3)
            tensor([[ True,  True, False],
                    [ True,  True,  True]])
        """
        mask, size, place = self._fitted("to_dense()", shape, device)
        remedy = "Use to_block_mask(), or pass limit=None to to_dense()."
        check_memory("to_dense()", size, torch.bool, limit, remedy)
        dense = torch.empty(size, dtype=torch.bool, device=place)
        leading = tuple(slice(0, n) for n in size[:-2])
        height = max(1, _MAX_NUMBERS * size[-2] // dense.numel())
        for start in range(0, size[-2], height):
            rows = slice(start, min(start + height, size[-2]))
            dense[..., rows, :] = mask.block(Box(leading, rows, slice(0, size[-1])), size, place)
        return dense

    def to_block_mask(
        self, *shape: int, block_size: int = 128, device: torch.device | str = "cpu"
    ) -> "BlockMask":
        """Return the mask for ``flex_attention(query, key, value, block_mask=...)``.

        The dense mask is never formed.

        Args:
            shape: (batch, num_heads, q_len, kv_len); leading axes of 1 may be left out. The mask
                of a matrix, ``A.mask``, has its shape and device already.
            block_size: rows and columns of the blocks that FlexAttention skips or computes.
            device: the device of the result, for a mask that is not the mask of a matrix.

        Returns:
            A BlockMask. Its batch or num_heads is 1 if all batch entries or heads share the mask.

        Raises:
            TypeError: block_size is not a whole number.
            ValueError: the shape is missing, has more than four axes, or the mask does not fit it.

        Example:
            >>> import regard
            >>> regard.SlidingWindow(100, 0).to_block_mask(1000, 1000).shape
            (1, 1, 1000, 1000)
        """
        check_count("block_size", block_size)
        mask, size, place = self._fitted("to_block_mask()", shape, device)
        if len(size) > 4:
            raise ValueError(
                f"to_block_mask() has shape {shape_text(size)}; "
                "FlexAttention needs (batch, num_heads, q_len, kv_len).\n"
                "    Take the mask of a part of the matrix, A[0].mask."
            )
        missing = 4 - len(size)
        mask = mask.map(lambda tensor: tensor[(None,) * missing])
        return _block_mask_of(mask, torch.Size((*(1,) * missing, *size)), place, block_size)

    def __bool__(self) -> bool:
        """Refuse ``a and b``, which Python would evaluate to b.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self.text} is a mask, neither true nor false.\n"
            "    Join masks with & (both allow), | (one allows) and ~, not with and, or, not."
        )

    def __and__(self, other: object) -> "Mask":
        """Return the mask that allows what both allow."""
        return And(self, as_mask(other))

    def __rand__(self, other: object) -> "Mask":
        """Return the mask that allows what both allow."""
        return And(as_mask(other), self)

    def __or__(self, other: object) -> "Mask":
        """Return the mask that allows what at least one of them allows."""
        return Or(self, as_mask(other))

    def __ror__(self, other: object) -> "Mask":
        """Return the mask that allows what at least one of them allows."""
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        """Return the mask that allows what this one does not."""
        return self.mask if isinstance(self, Not) else Not(self)

    def __repr__(self) -> str:
        """Return the mask as code, with a drawing if it is the mask of a small matrix.

        Only the first matrix of several is drawn.
        """
        if self.shape is None or self.device is None or self.device.type == "meta":
            return self.text
        *leading, q_len, kv_len = self.shape
        if q_len > _DRAWN_ROWS or kv_len > _DRAWN_COLUMNS:
            return self.text
        box = Box(tuple(slice(0, 1) for _ in leading), slice(0, q_len), slice(0, kv_len))
        allowed = self.block(box, self.shape, self.device)
        allowed = allowed.expand(*(1 for _ in leading), q_len, kv_len).flatten(0, -2)
        rows = cast(list[list[bool]], allowed.tolist())
        first = f" of [{', '.join('0' for _ in leading)}]" if self.shape[:-2].numel() > 1 else ""
        title = f"{q_len} x {kv_len}{first}: queries down, keys across, ■ may attend"
        drawn = (" ".join("■" if may else "□" for may in row) for row in rows)
        return "\n".join((self.text, title, *drawn))

    def _fields(self) -> dict[str, object]:
        """Return the arguments of the mask by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def _copy(self, values: dict[str, object]) -> Self:
        """Return a mask of the same class with these attributes."""
        mask = object.__new__(type(self))  # copy.copy takes five times as long
        vars(mask).update(values)
        return mask

    def _fitted(
        self, what: str, shape: tuple[int, ...], device: torch.device | str
    ) -> tuple["Mask", torch.Size, torch.device]:
        """Return the bound mask, and the shape and the device of its matrix."""
        if not shape and self.shape is not None and self.device is not None:
            return self, self.shape, self.device
        if len(shape) < 2 or min(check_whole("shape", n) for n in shape) < 1:
            raise ValueError(
                f"{what} has shape {shape_text(shape)}; "
                "it must have q_len and kv_len, at least 1.\n"
                f"    Use {what[:-1]}q_len, kv_len), or the mask of a matrix, A.mask.{what}."
            )
        size, place = torch.Size(shape), torch.device(device)
        return self.bind(size, place), size, place


def _block_mask_of(
    mask: Mask, shape: torch.Size, device: torch.device, block_size: int
) -> "BlockMask":
    """Return the BlockMask of a mask bound to (batch, num_heads, q_len, kv_len)."""
    from torch.nn.attention.flex_attention import BlockMask  # imported late, because few need it

    q_len, kv_len = shape[-2:]
    leading = (slice(0, shape[0]), slice(0, shape[1]))
    corner = mask.block(Box(leading, slice(0, 1), slice(0, 1)), shape, device)
    distinct = (1, 1, *corner.shape[:-2])[-2:]  # batch or 1, num_heads or 1
    blocks = (-(-q_len // block_size), -(-kv_len // block_size))
    grid = torch.full((*distinct, *blocks), EMPTY, device=device)
    step = max(1, _MAX_NUMBERS // (shape[0] * shape[1] * block_size**2))
    for row in range(blocks[0]):
        rows = slice(row * block_size, min((row + 1) * block_size, q_len))
        some, every = mask.key_bounds(leading, rows, shape)
        first, last = some.start // block_size, -(-some.stop // block_size)
        full = slice(-(-every.start // block_size), every.stop // block_size)
        if full.start >= full.stop or rows.stop - rows.start < block_size:
            full = slice(last, last)  # a block that the edge of the matrix cuts is never full
        grid[..., row, full] = FULL
        for start, stop in ((first, full.start), (full.stop, last)):
            for at in range(start, stop, step):
                end = min(at + step, stop)
                box = Box(leading, rows, slice(at * block_size, min(end * block_size, kv_len)))
                grid[..., row, at:end] = _kinds(mask.block(box, shape, device), box, block_size)
    return BlockMask.from_kv_blocks(
        *_listed(grid == PARTIAL),
        *_listed(grid == FULL),
        BLOCK_SIZE=block_size,
        mask_mod=mask.mask_mod(shape),
        seq_lengths=(q_len, kv_len),
    )


def _kinds(allowed: Tensor, box: Box, block_size: int) -> Tensor:
    """Return EMPTY, PARTIAL or FULL for each block in a row of blocks, (..., blocks).

    ``allowed`` is the mask of that row of blocks.
    """
    height, width = box.rows.stop - box.rows.start, box.columns.stop - box.columns.start
    allowed = allowed.expand(*allowed.shape[:-2], height, width)
    padded = pad(allowed, (0, -width % block_size, 0, block_size - height))
    blocks = padded.reshape(*padded.shape[:-1], -1, block_size)  # (..., rows, blocks, columns)
    return blocks.any(-1).any(-2).long() + blocks.all(-1).all(-2)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each row, and all block indices, chosen ones first."""
    indices = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1, dtype=torch.int32), indices.int()


def selected(mask: Mask | None, index: Sequence[int | slice]) -> Mask | None:
    """Return the mask of a part of the leading axes, as views."""
    return None if mask is None else mask.map(lambda tensor: broadcast_index(tensor, index))


def as_mask(mask: object) -> Mask:
    """Return the mask itself, or the mask of a bool tensor, a mask_mod or a BlockMask.

    Raises:
        TypeError: anything else.

    Example:
        >>> import torch, regard
        >>> regard.masks.as_mask(torch.tensor([True, False]))
        Keep((2,))
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise TypeError(
            f"mask is the class {mask.__name__}; it must be an instance.\n"
            f"    Use {mask.__name__}(...)."
        )
    # These imports are late because the modules import this one, and few calls need flex_attention.
    if isinstance(mask, Tensor):
        from regard.masks.tensors import Keep

        return Keep(mask)
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.flex import BlockSparse, MaskMod

    if isinstance(mask, BlockMask):
        return BlockSparse.of(mask)
    if callable(cast(object, mask)):
        return MaskMod(cast(PointMask, mask))
    raise no_mask(cast(object, mask))


def no_mask(mask: object) -> TypeError:
    """Return the TypeError for an invalid mask."""
    came = kind_text(mask)
    if isinstance(mask, Tensor):
        came = with_article(f"{dtype_text(mask.dtype)} tensor")
    return TypeError(
        f"mask is {came}; a mask is a bool tensor (True = may attend), one of regard.masks, "
        "or a mask_mod or BlockMask of FlexAttention.\n"
        "    To add numbers to the scores, pass bias=. For nn.MultiheadAttention's convention "
        "(True = may not), use Drop(mask)."
    )


def fits(tensor: Tensor, axes: Sequence[int]) -> bool:
    """Return True if the tensor has these axes, each of full length or 1."""
    same = tensor.ndim == len(axes)
    return same and all(n in (1, full) for n, full in zip(tensor.shape, axes, strict=True))


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the tensor with an axis of 1 in place of each axis that was expanded."""
    return tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())]


def overlap(first: slice, second: slice) -> slice:
    """Return the keys that lie in both ranges."""
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return slice(start, max(start, stop))


def hull(first: slice, second: slice) -> slice:
    """Return the smallest range that contains two ranges, each of which may be empty."""
    if not length(first):
        return second
    if not length(second):
        return first
    return slice(min(first.start, second.start), max(first.stop, second.stop))


def around(keys: slice, total: int) -> tuple[slice, slice]:
    """Return the range of keys before a range and the one after it; (all, none) if it is empty."""
    if not length(keys):
        return slice(0, total), NO_KEYS
    return slice(0, keys.start), slice(keys.stop, total)


@final
@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Two masks that must both allow a key: the result of ``first & second``.

    Example:
        >>> import regard
        >>> regard.Causal() & regard.SlidingWindow(2, 2)
        Causal() & SlidingWindow(2, 2)
    """

    thread_safe = True

    first: Mask
    second: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return And(self.first.bind(shape, device), self.second.bind(shape, device))

    def allows(self, points: Points) -> Tensor:
        return self.first.allows(points) & self.second.allows(points)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        first = self.first.key_bounds(leading, rows, shape)
        second = self.second.key_bounds(leading, rows, shape)
        return KeyBounds(overlap(first.any, second.any), overlap(first.all, second.all))

    def limits(self, shape: torch.Size) -> PositionLimits | None:
        first, second = self.first.limits(shape), self.second.limits(shape)
        return None if first is None or second is None else first.joined(second)

    def rows(self, rows: range, q_len: int) -> Mask:
        return And(self.first.rows(rows, q_len), self.second.rows(rows, q_len))

    @property
    def text(self) -> str:
        parts = (self.first, self.second)
        return " & ".join(f"({p.text})" if isinstance(p, Or) else p.text for p in parts)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Two masks of which at least one must allow a key: the result of ``first | second``.

    Example:
        >>> import regard
        >>> regard.Causal() | regard.Padding(3)
        Causal() | Padding(3)
    """

    thread_safe = True

    first: Mask
    second: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Or(self.first.bind(shape, device), self.second.bind(shape, device))

    def allows(self, points: Points) -> Tensor:
        return self.first.allows(points) | self.second.allows(points)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        first = self.first.key_bounds(leading, rows, shape)
        second = self.second.key_bounds(leading, rows, shape)
        touch = max(first.all.start, second.all.start) <= min(first.all.stop, second.all.stop)
        longer = max(first.all, second.all, key=length)
        every = hull(first.all, second.all) if touch else longer
        return KeyBounds(hull(first.any, second.any), every)

    def rows(self, rows: range, q_len: int) -> Mask:
        return Or(self.first.rows(rows, q_len), self.second.rows(rows, q_len))

    @property
    def text(self) -> str:
        return f"{self.first.text} | {self.second.text}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """A mask that allows what another does not: the result of ``~mask``.

    Example:
        >>> import regard
        >>> ~regard.Causal()
        ~Causal()
    """

    thread_safe = True

    mask: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Not(self.mask.bind(shape, device))

    def allows(self, points: Points) -> Tensor:
        return ~self.mask.allows(points)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        inner = self.mask.key_bounds(leading, rows, shape)
        every = max(around(inner.any, shape[-1]), key=length)
        return KeyBounds(hull(*around(inner.all, shape[-1])), every)

    def rows(self, rows: range, q_len: int) -> Mask:
        return Not(self.mask.rows(rows, q_len))

    @property
    def text(self) -> str:
        pair = isinstance(self.mask, And | Or)
        return f"~({self.mask.text})" if pair else f"~{self.mask.text}"
