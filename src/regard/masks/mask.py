"""What a mask is, and how masks combine. True always means *may attend*.

A mask is a small immutable value; ``bind`` fits it to the shape of a matrix and checks it there.
Rows and columns are aligned at the bottom right when ``q_len != kv_len``: the last query sits at
the last key, as with a KV cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import torch
from torch import Tensor

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
from regard.masks.block_mask import block_mask_of
from regard.masks.drawing import drawing
from regard.masks.key_bounds import KeyBounds, around, hull, length, overlap
from regard.scores.box import Box

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "And",
    "Mask",
    "MaskLike",
    "Not",
    "Or",
    "PointMask",
    "as_mask",
    "no_mask",
    "pick",
]

PointMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask_mod: b, h, q_idx and kv_idx, each a scalar tensor; True = may attend."""

MaskLike: TypeAlias = "Mask | Tensor | PointMask | BlockMask"
"""What may be given as a mask."""

_AT_ONCE = 2**22


class Mask(ABC):
    """Which keys a query may attend to; combine masks with ``&``, ``|`` and ``~``.

    Attributes:
        shape: of the matrix whose mask it is, as in ``A.mask``; None for a mask by itself.
        device: of that matrix.

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

    shape: torch.Size | None = None
    device: torch.device | None = None

    @abstractmethod
    def bind(self, shape: torch.Size, device: torch.device) -> "Mask":
        """The mask fitted to a matrix of this shape; its tensors get all axes, full or 1."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Mask":
        """The same mask with the function applied to every tensor of a bound mask."""

    @abstractmethod
    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        """Which keys these rows of these heads can attend to, as narrow as is quickly known.

        Args:
            leading: a slice with a start and a stop for each leading axis of the matrix.
            rows: the queries.
            shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
        """

    @abstractmethod
    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        """True where a key may be attended to, broadcastable to the box."""

    @abstractmethod
    def mask_mod(self, shape: torch.Size) -> PointMask:
        """A bound mask of shape (batch, num_heads, q_len, kv_len) as FlexAttention's mask_mod."""

    @property
    @abstractmethod
    def text(self) -> str:
        """How one writes the mask."""

    @property
    def tensors(self) -> list[Tensor]:
        """What a bound mask is made of; not what a callable reads."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(note)
        return found

    def of_matrix(self, shape: torch.Size, device: torch.device) -> Self:
        """A bound mask that knows the matrix whose mask it is."""
        mask = object.__new__(type(self))  # copy.copy takes five times as long
        vars(mask).update(vars(self), shape=shape, device=device)
        return mask

    def to_dense(
        self, *shape: int, device: torch.device | str = "cpu", limit: int | None = DENSE_LIMIT
    ) -> Tensor:
        """The whole mask as a bool tensor, True = may attend: by name only.

        Args:
            shape: (..., num_heads, q_len, kv_len) or (q_len, kv_len). The mask of a matrix,
                ``A.mask``, has its shape and device already.
            device: for a mask by itself.
            limit: the most bytes it may take, 4 GiB unless given; None is no limit.

        Raises:
            ValueError: no shape, or one that the mask does not fit.
            MemoryError: it would take more than the limit.

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
        height = max(1, _AT_ONCE * size[-2] // dense.numel())
        for start in range(0, size[-2], height):
            rows = slice(start, min(start + height, size[-2]))
            dense[..., rows, :] = mask.block(Box(leading, rows, slice(0, size[-1])), size, place)
        return dense

    def to_block_mask(
        self, *shape: int, block_size: int = 128, device: torch.device | str = "cpu"
    ) -> "BlockMask":
        """The mask for ``flex_attention(query, key, value, block_mask=...)``, never formed.

        Args:
            shape: (batch, num_heads, q_len, kv_len); leading axes of 1 may be left out. The mask
                of a matrix, ``A.mask``, has its shape and device already.
            block_size: of the blocks that FlexAttention skips or computes.
            device: for a mask by itself.

        Returns:
            A BlockMask; its batch or num_heads is 1 where the mask is the same for all.

        Raises:
            TypeError: block_size is no whole number.
            ValueError: no shape, more than four axes, or a shape that the mask does not fit.

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
                "FlexAttention knows (batch, num_heads, q_len, kv_len).\n"
                "    Take the mask of a part of the matrix, A[0].mask."
            )
        missing = 4 - len(size)
        mask = mask.map(lambda tensor: tensor[(None,) * missing])
        return block_mask_of(mask, torch.Size((*(1,) * missing, *size)), place, block_size)

    def __bool__(self) -> bool:
        """``a and b`` would quietly be b.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self.text} is a mask, neither true nor false.\n"
            "    Join masks with & (both allow), | (one allows) and ~, not with and, or, not."
        )

    def __and__(self, other: object) -> "Mask":
        """Both masks must allow."""
        return And(self, as_mask(other))

    def __rand__(self, other: object) -> "Mask":
        """Both masks must allow."""
        return And(as_mask(other), self)

    def __or__(self, other: object) -> "Mask":
        """One of the masks must allow."""
        return Or(self, as_mask(other))

    def __ror__(self, other: object) -> "Mask":
        """One of the masks must allow."""
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        """The mask must not allow."""
        return self.mask if isinstance(self, Not) else Not(self)

    def __repr__(self) -> str:
        """How one writes the mask; the mask of a small matrix is drawn, too."""
        if self.shape is None or self.device is None:
            return self.text
        return "\n".join((self.text, *drawing(self, self.shape, self.device)))

    def _fitted(
        self, what: str, shape: tuple[int, ...], device: torch.device | str
    ) -> tuple["Mask", torch.Size, torch.device]:
        """The bound mask, the shape and the device of its matrix."""
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


def as_mask(mask: object) -> Mask:
    """The mask itself; or a mask made of a bool tensor, a mask_mod or a BlockMask.

    Raises:
        TypeError: anything else.

    Example:
        >>> import torch, regard
        >>> regard.masks.as_mask(torch.tensor([True, False]))
        Keep((2,))
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        from regard.masks.tensor_masks import Keep  # a mask, too

        return Keep(mask)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise TypeError(
            f"mask is the class {mask.__name__}; it must be an instance.\n"
            f"    Use {mask.__name__}(...)."
        )
    if not isinstance(mask, Tensor):
        from regard.masks.flex_masks import flex_mask  # its classes are masks

        if (flex := flex_mask(cast(object, mask))) is not None:
            return flex
    raise no_mask(cast(object, mask))


def pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """tensor[index] of scalar tensors, where an axis of length 1 stands for every index."""
    axes = zip(index, tensor.shape, strict=True)
    return tensor[tuple(torch.zeros_like(at) if length == 1 else at for at, length in axes)]


def no_mask(mask: object) -> TypeError:
    """What is said of something that is no mask."""
    came = kind_text(mask)
    if isinstance(mask, Tensor):
        came = with_article(f"{dtype_text(mask.dtype)} tensor")
    return TypeError(
        f"mask is {came}; a mask is a bool tensor (True = may attend), one of regard.masks, "
        "or a mask_mod or BlockMask of FlexAttention.\n"
        "    To add numbers to the scores, pass bias=. For nn.MultiheadAttention's convention "
        "(True = may not), use Drop(mask)."
    )


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Two masks that must both allow: what ``first & second`` gives.

    Example:
        >>> import regard
        >>> regard.Causal() & regard.SlidingWindow(2, 2)
        Causal() & SlidingWindow(2, 2)
    """

    first: Mask
    second: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return And(self.first.bind(shape, device), self.second.bind(shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return And(self.first.map(function), self.second.map(function))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        first = self.first.key_bounds(leading, rows, shape)
        second = self.second.key_bounds(leading, rows, shape)
        return KeyBounds(overlap(first.any, second.any), overlap(first.all, second.all))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return self.first.block(box, shape, device) & self.second.block(box, shape, device)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        first, second = self.first.mask_mod(shape), self.second.mask_mod(shape)
        return lambda b, h, q_idx, kv_idx: first(b, h, q_idx, kv_idx) & second(b, h, q_idx, kv_idx)

    @property
    def text(self) -> str:
        parts = (self.first, self.second)
        return " & ".join(f"({p.text})" if isinstance(p, Or) else p.text for p in parts)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Two masks of which one must allow: what ``first | second`` gives.

    Example:
        >>> import regard
        >>> regard.Causal() | regard.Padding(3)
        Causal() | Padding(3)
    """

    first: Mask
    second: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Or(self.first.bind(shape, device), self.second.bind(shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Or(self.first.map(function), self.second.map(function))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        first = self.first.key_bounds(leading, rows, shape)
        second = self.second.key_bounds(leading, rows, shape)
        touch = max(first.all.start, second.all.start) <= min(first.all.stop, second.all.stop)
        longer = max(first.all, second.all, key=length)
        every = hull(first.all, second.all) if touch else longer
        return KeyBounds(hull(first.any, second.any), every)

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return self.first.block(box, shape, device) | self.second.block(box, shape, device)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        first, second = self.first.mask_mod(shape), self.second.mask_mod(shape)
        return lambda b, h, q_idx, kv_idx: first(b, h, q_idx, kv_idx) | second(b, h, q_idx, kv_idx)

    @property
    def text(self) -> str:
        return f"{self.first.text} | {self.second.text}"


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """What a mask does not allow: what ``~mask`` gives.

    Example:
        >>> import regard
        >>> ~regard.Causal()
        ~Causal()
    """

    mask: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Not(self.mask.bind(shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Not(self.mask.map(function))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        inner = self.mask.key_bounds(leading, rows, shape)
        before, after = around(inner.any, shape[-1])
        every = max(before, after, key=length)
        before, after = around(inner.all, shape[-1])
        return KeyBounds(hull(before, after), every)

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return ~self.mask.block(box, shape, device)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        inner = self.mask.mask_mod(shape)
        return lambda b, h, q_idx, kv_idx: ~inner(b, h, q_idx, kv_idx)

    @property
    def text(self) -> str:
        pair = isinstance(self.mask, And | Or)
        return f"~({self.mask.text})" if pair else f"~{self.mask.text}"
