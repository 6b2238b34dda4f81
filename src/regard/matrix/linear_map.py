"""Lazy matrices that multiply tensors, and the matrices that are made of them.

``A @ x``, ``x @ A``, ``A.T @ x`` and ``torch.matmul`` behave as for a tensor of the same shape.
Products, sums, means, multiples and transposes of lazy matrices are lazy, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from math import inf
from numbers import Real
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, cast, overload

import torch
from torch import Tensor

from regard.errors import (
    DENSE_LIMIT,
    check_memory,
    check_product,
    check_same_device,
    check_same_dtype,
    kind_text,
    shape_text,
    with_article,
)
from regard.matrix.indexing import (
    LeadingIndex,
    ParsedIndex,
    fit_index,
    parse_index,
    read_tile,
    select_leading,
)
from regard.matrix.tensor_methods import AT_ONCE, remedy, tensor_attribute
from regard.scores.autocast import autocast_dtype, without_autocast
from regard.scores.score_source import accumulation_dtype

_EAGER = "within a graph write torch.matmul(A, x) for A @ x"
_FEW_ROWS = 64  # with more, chosen columns are a product with columns of the identity

ProductWatcher: TypeAlias = "Callable[[LinearMap, Tensor, Callable[[], Tensor]], Tensor]"
"""Called with a matrix, a value and a function that multiplies them; returns the product."""

# ``A @ x`` calls neither a TorchFunctionMode nor a TorchDispatchMode, so watchers are called here.
# A context variable is local to one thread.
_WATCHERS: ContextVar[tuple[ProductWatcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watched_products(watcher: ProductWatcher) -> Generator[None, None, None]:
    """Call a watcher for each ``A @ x`` of this thread inside the with block.

    The watcher returns the product. Products ``x @ A`` and compiled code do not call it.

    Example:
        >>> import torch, regard
        >>> from regard.matrix.linear_map import watched_products
        >>> shapes, x = [], torch.zeros(3, 1)
        >>> def watch(matrix, value, multiply):
        ...     shapes.append(tuple(matrix.shape))
        ...     return multiply()
        >>> with watched_products(watch):
        ...     output = regard.attend(x, x) @ x
        >>> shapes
        [(3, 3)]
    """
    _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:  # blocks may end in any order
        _WATCHERS.set(tuple(each for each in _WATCHERS.get() if each is not watcher))


def _watched(matrix: "LinearMap", value: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
    if not torch.compiler.is_compiling():
        for watcher in _WATCHERS.get():
            multiply = partial(watcher, matrix, value, multiply)
    return multiply()


class LinearMap(ABC):
    """A lazy matrix, defined by its products with tensors and by its parts.

    It has the methods of tensors that ``tensor_methods`` lists. For any other name of
    ``torch.Tensor`` it raises an AttributeError that says what to write instead.
    """

    instead: ClassVar[str] = "a product, A @ x"
    """The remedy of messages for functions that need all numbers."""

    _smaller: ClassVar[str] = (
        "Ask for a part, A[..., rows, cols], or for products, A @ x, "
        "or pass limit=None to to_dense()."
    )

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(..., rows, columns)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of products, except under autocast."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of products."""

    @abstractmethod
    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return the whole matrix as a tensor.

        Args:
            limit: the maximum number of bytes, 4 GiB by default; None for no limit.

        Raises:
            MemoryError: the tensor would exceed the limit; the message states its size.
        """

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "LinearMap":
        """Return the same matrix with a function applied to every tensor of numbers."""

    @abstractmethod
    def _times(self, value: Tensor) -> Tensor:
        """Return self @ value."""

    @abstractmethod
    def _transposed_times(self, operand: Tensor) -> Tensor:
        """Return self.T @ operand."""

    def _either_times(self, x: Tensor, *, transposed: bool) -> Tensor:
        """Return self @ x, or self.T @ x."""
        return self._transposed_times(x) if transposed else self._times(x)

    @abstractmethod
    def _select(self, index: LeadingIndex) -> "LinearMap":
        """Return the matrix of a part of the leading axes."""

    @abstractmethod
    def _part(self, rows: range, columns: range) -> Tensor:
        """Return some rows and columns, neither empty, as a tensor (..., rows, columns)."""

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one axis, as ``Tensor.size`` does."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def T(self) -> "LinearMap":
        """The transposed matrix, its last two axes exchanged, for ``A.T @ x``."""
        return self.of if isinstance(self, TransposedMatrix) else TransposedMatrix(self)

    mT = T  # the name that tensors with leading axes use

    def sum_leading(self, axis: int, divisor: int) -> "LinearMap":
        """Return the lazy sum over a leading axis, counted from the first, over a divisor."""
        return LeadingSum(self, axis, divisor)

    def __getitem__(self, key: Any) -> Any:
        """Return a lazy matrix if the index keeps all rows and columns, else a tensor.

        An index keeps rows and columns if it leaves them out or has ``:`` for them. A range gives a
        tensor of weights, even a range of all rows.
        """
        asked = parse_index(key, self.shape)
        part = self._select(asked.leading)
        if asked.whole:
            return part
        size = (*part.shape[:-2], *map(len, asked.tile))
        check_memory("this part", size, self.dtype, DENSE_LIMIT, self._smaller)
        return part._tile(asked)

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return self.shape[0]

    if not TYPE_CHECKING:  # checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that tensors have, or raise an error with a remedy."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            return tensor_attribute(self, name)

    @overload
    def __matmul__(self, value: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, value: "LinearMap") -> "LinearMap": ...
    def __matmul__(self, value: Any) -> Any:
        """Return self @ value, an ordinary tensor; leading axes broadcast as in ``torch.matmul``.

        The product with another lazy matrix is a lazy matrix. Under autocast the value may be of
        another dtype, and the product has autocast's dtype.
        """
        if isinstance(value, LinearMap):
            return MatrixProduct(self, value)
        return self._cast(value, lambda value: _watched(self, value, lambda: self._times(value)))

    def __add__(self, other: Any) -> "LinearMap":
        """Return the lazy sum with another lazy matrix, or with a tensor of its shape, as eye."""
        return _combined((self, 1.0), (other, 1.0))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "LinearMap":
        """Return the lazy difference."""
        return _combined((self, 1.0), (other, -1.0))

    def __rsub__(self, other: Any) -> "LinearMap":
        """Return the lazy difference."""
        return _combined((other, 1.0), (self, -1.0))

    def __neg__(self) -> "LinearMap":
        return _combined((self, -1.0))

    def __mul__(self, other: Any) -> "LinearMap":
        """Return the lazy matrix times a number, or with rows or columns times one number each."""
        if isinstance(other, Tensor) and other.ndim:
            return _scaled(self, other.to(accumulation_dtype(self.dtype)))
        return _combined((self, _factor(other)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "LinearMap":
        """Return the lazy matrix divided as ``*`` multiplies: ``A / A.sum(-1, keepdim=True)``."""
        if isinstance(other, Tensor):
            return self * other.to(accumulation_dtype(self.dtype)).reciprocal()
        number = _factor(other)
        return self * (1 / number if number else inf)

    def _refuse_operator(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"this operator does not take {with_article(type(self).__name__)}; it holds no "
            f"numbers.\n    {remedy(self, 'gt')}"
        )

    def __eq__(self, other: object) -> bool:
        """Return True for the same object; refuse numbers and tensors, as ``A > 0.1`` does."""
        if isinstance(other, Tensor | Real):
            self._refuse_operator()
        return self is other

    __hash__ = object.__hash__

    __lt__ = __le__ = __gt__ = __ge__ = __pow__ = __rpow__ = __rtruediv__ = _refuse_operator
    __abs__ = __floordiv__ = __mod__ = __and__ = __or__ = __xor__ = __invert__ = _refuse_operator

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        """Refuse a change in place.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{with_article(type(self).__name__)} cannot be changed in place; it holds no "
            f"numbers.\n    {remedy(self, 'masked_fill')}"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run torch.matmul(A, value), x @ A, torch.stack, and functions that A has as methods.

        ``torch.stack([A, B])`` forms the matrices, as many tools for small texts expect.
        """
        if func in (torch.matmul, Tensor.matmul) and len(args) == 2 and not kwargs:
            left, right = args
            if isinstance(left, LinearMap):
                return args[0].__matmul__(right)  # Dynamo hands `left @ right` to this method
            if isinstance(right, LinearMap):
                # Dynamo may also swap the operands of A @ x. A graph break avoids both cases.
                if torch.compiler.is_compiling():
                    outside: Any = torch.compiler.disable(right._times_from_left, reason=_EAGER)
                    return outside(left)
                return right._times_from_left(left)
        if func is torch.stack:
            matrices, *others = args
            dense = [each.to_dense() if isinstance(each, LinearMap) else each for each in matrices]
            return torch.stack(dense, *others, **(kwargs or {}))
        name = func.__name__
        if len(args) == 2 and not kwargs and isinstance(args[1], LinearMap) and name in _REFLECTED:
            return _REFLECTED[name](*args)
        of_extremes = name in ("max", "min") and len(args) == 1 and not kwargs
        is_method = func in (getattr(torch, name, None), getattr(Tensor, name, None))
        if is_method and args and isinstance(args[0], LinearMap) and not of_extremes:
            method = getattr(args[0], name, None)
            if method is not None:
                return method(*args[1:], **(kwargs or {}))
        raise TypeError(
            f"torch.{name} does not take {with_article(cls.__name__)}; it holds no numbers.\n"
            f"    {remedy(cls, name)}"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse NumPy, which would make an array of one object.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"NumPy does not take {with_article(type(self).__name__)}; it holds no numbers.\n"
            "    Use to_dense().numpy(), or tensors in products: A @ torch.as_tensor(x)."
        )

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse torch.as_tensor, which would read number after number.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"no tensor is made of {with_article(type(self).__name__)}; it holds no numbers.\n"
            "    Use to_dense(), or a part, such as A[0, 3, :10]."
        )

    __dlpack_device__ = __dlpack__

    def _dense(self, limit: int | None) -> Tensor:
        """Return the whole matrix, if it is within a limit."""
        check_memory("to_dense()", self.shape, self.dtype, limit, self._smaller)
        rows, columns = self.shape[-2:]
        return self._part(range(rows), range(columns))

    def _tile(self, asked: ParsedIndex) -> Tensor:
        """Return the rows and columns of an index as a tensor."""
        rows, columns = asked.tile
        if not (rows and columns):
            size = (*self.shape[:-2], len(rows), len(columns))
            return asked.drop_axes(torch.zeros(size, dtype=self.dtype, device=self.device))
        if isinstance(columns, list):
            if len(rows) > _FEW_ROWS:
                numbers = self._times(self._unit_columns(columns, self.shape[-1]))
                rows = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
                return asked.drop_axes(numbers[..., rows, :])
            every = read_tile(rows, range(self.shape[-1]), self._part)
            return asked.drop_axes(every[..., columns])
        return asked.drop_axes(read_tile(rows, columns, self._part))

    def _unit_columns(self, places: Sequence[int], length: int) -> Tensor:
        """Return columns of the identity, (length, columns)."""
        units = torch.zeros(length, len(places), dtype=self.dtype, device=self.device)
        units[list(places), range(len(places))] = 1
        return units

    def with_axes(self, ndim: int) -> "LinearMap":
        """Return the matrix with leading axes of length 1 before the others, ndim in all."""
        if ndim == self.ndim:
            return self
        leading = tuple(slice(0, n, 1) for n in self.shape[:-2])
        return self._select(((None,) * (ndim - self.ndim)) + leading)

    def _times_from_left(self, x: Tensor) -> Tensor:
        rows = self.shape[-2]
        if x.shape[-1:] != (rows,):
            raise ValueError(
                f"x has shape {shape_text(x.shape)}; for x @ A its last axis must have the "
                f"{rows} rows of A, {shape_text(self.shape)}.\n"
                "    For a product from the right use A @ x."
            )
        if x.ndim == 1:
            return self._cast(x, self._transposed_times)
        return self._cast(x.mT, self._transposed_times).mT

    def _cast(self, operand: Tensor, times: Callable[[Tensor], Tensor]) -> Tensor:
        """Return times(operand) with the dtypes of ``torch.matmul`` under autocast.

        The matrix itself is not cast, so its products agree with its rows and statistics.
        """
        dtype = autocast_dtype(self.dtype, self.device)
        if dtype is None:
            return times(operand)
        if isinstance(operand, Tensor) and autocast_dtype(operand.dtype, operand.device):
            operand = operand.to(self.dtype)
        return times(operand).to(dtype)


class TransposedMatrix(LinearMap):
    """The transpose of a lazy matrix, ``A.T``.

    Attributes:
        of: the matrix that is transposed.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 1)
        >>> A = regard.attend(x, x, mask=regard.Causal())
        >>> A.T @ torch.tensor([[1.0], [1.0]])
        tensor([[1.5000],
                [0.5000]])
    """

    def __init__(self, matrix: LinearMap) -> None:
        self.of = matrix

    @property
    def shape(self) -> torch.Size:
        *leading, rows, columns = self.of.shape
        return torch.Size((*leading, columns, rows))

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def device(self) -> torch.device:
        return self.of.device

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        return self.of.to_dense(limit=limit).mT

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        return self.of.map(function).T

    def _times(self, value: Tensor) -> Tensor:
        return self.of._transposed_times(value)

    def _transposed_times(self, operand: Tensor) -> Tensor:
        return self.of._times(operand)

    def _select(self, index: LeadingIndex) -> LinearMap:
        return self.of._select(index).T

    def _part(self, rows: range, columns: range) -> Tensor:
        return self.of._part(columns, rows).mT

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"TransposedMatrix(of {self.of!r})"


class DerivedMatrix(LinearMap):
    """A lazy matrix that is made of others.

    Attributes:
        like: a matrix or a tensor with the same dtype and device.
    """

    like: LinearMap | Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @abstractmethod
    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        """Return self @ x, or self.T @ x, of checked columns x, (..., tokens, dim)."""

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        return self._dense(limit)

    def _times(self, value: Tensor) -> Tensor:
        return self._product("value", value, transposed=False)

    def _transposed_times(self, operand: Tensor) -> Tensor:
        return self._product("operand", operand, transposed=True)

    def _product(self, name: str, operand: Tensor, *, transposed: bool) -> Tensor:
        operand = check_product(name, operand, self.dtype)
        check_same_device(name, operand.device, "the matrix", self.device, f"{name}.to(A.device)")
        self._check_fits(name, operand, self.shape[-2 if transposed else -1])
        if operand.ndim == 1:
            return self._through(operand[:, None], transposed=transposed).squeeze(-1)
        return self._through(operand, transposed=transposed)

    def _check_fits(self, name: str, operand: Tensor, tokens: int) -> None:
        batch = self.shape[:-2]
        fits = 0 not in operand.shape and (operand.shape[-2:-1] or operand.shape) == (tokens,)
        if not fits or not _do_broadcast(operand.shape[:-2], batch):
            raise ValueError(
                f"{name} has shape {shape_text(operand.shape)}; it must be (..., {tokens}, dim), "
                f"with leading axes that broadcast with {shape_text(batch)}, or ({tokens},).\n"
                f"    The matrix has shape {shape_text(self.shape)}."
            )


class LeadingSum(DerivedMatrix):
    """The sum or the mean of a lazy matrix over a leading axis, such as ``A.mean(1)``.

    Index it and multiply it as the matrix itself. It is not a softmax of scores, so that it has no
    entropy and no logsumexp.

    Attributes:
        of: the matrix.
        axis: the axis, counted from the first.
        divisor: divides the sum; the length of the axis for a mean.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> A = regard.attend(x, x, mask=regard.Causal())
        >>> A.mean(1)[0, 1]
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, of: LinearMap, axis: int, divisor: int) -> None:
        self.like = self.of = of
        self.axis = axis
        self.divisor = divisor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.of.shape[: self.axis], *self.of.shape[self.axis + 1 :]))

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        return LeadingSum(self.of.map(function), self.axis, self.divisor)

    def _select(self, index: LeadingIndex) -> LinearMap:
        positions = [at for at, item in enumerate(index) if item is not None]
        position = [*positions, len(index)][self.axis]
        before = index[:position]
        summed = (*before, slice(0, self.of.shape[self.axis], 1), *index[position:])
        axis = sum(not isinstance(item, int) for item in before)
        return LeadingSum(self.of._select(summed), axis, self.divisor)

    def _part(self, rows: range, columns: range) -> Tensor:
        size = self.shape[:-2].numel() * len(rows) * len(columns)
        return self._total(size, lambda matrix: matrix._part(rows, columns))

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        axis = self.axis - self.of.ndim
        x = x.unsqueeze(axis) if x.ndim + 1 >= -axis else x
        tokens = self.shape[-1 if transposed else -2]
        size = self.shape[:-2].numel() * tokens * x.shape[-1]
        return self._total(size, lambda matrix: matrix._either_times(x, transposed=transposed))

    def _total(self, size: int, numbers: Callable[[LinearMap], Tensor]) -> Tensor:
        """Return the sum of the numbers of each index of the axis.

        Args:
            size: how many numbers one index has; those of several exist at once.
            numbers: returns the numbers of a part of the matrix, with the axis.
        """
        count, axis = self.of.shape[self.axis], self.axis - self.of.ndim
        step = max(1, AT_ONCE // size)
        leading = [slice(0, n, 1) for n in self.of.shape[:-2]]
        total = torch.zeros((), dtype=accumulation_dtype(self.dtype), device=self.device)
        for start in range(0, count, step):
            leading[self.axis] = slice(start, min(start + step, count), 1)
            part = numbers(self.of._select(tuple(leading)))
            total = total + part.sum(axis, dtype=total.dtype)
        return (total / self.divisor).to(self.dtype)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"LeadingSum(axis={self.axis}, divisor={self.divisor}, of {self.of!r})"


class LinearCombination(DerivedMatrix):
    """A weighted sum of lazy matrices, such as ``(A.mean(1) + eye) / 2``.

    Attributes:
        terms: matrices of one number of axes, each with its factor, a number or a tensor without
            axes. Leading axes have one length or length 1.
    """

    def __init__(self, terms: tuple[tuple[LinearMap, float | Tensor], ...]) -> None:
        self.terms = terms
        self.like = terms[0][0]

    @property
    def shape(self) -> torch.Size:
        return _joint_shape(*(matrix.shape for matrix, _ in self.terms))

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        return LinearCombination(
            tuple(
                (matrix.map(function), function(factor) if isinstance(factor, Tensor) else factor)
                for matrix, factor in self.terms
            )
        )

    def _select(self, index: LeadingIndex) -> LinearMap:
        lengths = self.shape
        return LinearCombination(
            tuple(
                (matrix._select(fit_index(index, matrix.shape, lengths)), factor)
                for matrix, factor in self.terms
            )
        )

    def _part(self, rows: range, columns: range) -> Tensor:
        return self._total(lambda matrix: matrix._part(rows, columns))

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        return self._total(lambda matrix: matrix._either_times(x, transposed=transposed))

    def _total(self, numbers: Callable[[LinearMap], Tensor]) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        parts = (numbers(matrix).to(wide) * factor for matrix, factor in self.terms)
        return reduce(add, parts).to(self.dtype)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        terms = (
            f"{'tensor' if isinstance(factor, Tensor) else f'{factor:g}'} * {matrix!r}"
            for matrix, factor in self.terms
        )
        return f"LinearCombination({' + '.join(terms)})"


class MatrixProduct(DerivedMatrix):
    """The product of two lazy matrices, ``A.mean(1) @ B.mean(1)``.

    Attributes:
        left: (..., rows, inner).
        right: (..., inner, columns), with as many axes; leading axes have one length or length 1.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes or the devices do not fit.
    """

    def __init__(self, left: LinearMap, right: LinearMap) -> None:
        _check_alike(left, right)
        if left.shape[-1] != right.shape[-2] or not _do_broadcast(
            left.shape[:-2], right.shape[:-2]
        ):
            raise ValueError(
                f"A has shape {shape_text(left.shape)} and B has {shape_text(right.shape)}; for "
                "A @ B the columns of A must be as many as the rows of B, and leading axes must "
                "broadcast.\n    Take the mean over the heads first, A.mean(1) @ B.mean(1)."
            )
        ndim = max(left.ndim, right.ndim)
        self.left, self.right = left.with_axes(ndim), right.with_axes(ndim)
        self.like = self.left

    @property
    def shape(self) -> torch.Size:
        leading = _joint_shape(self.left.shape[:-2], self.right.shape[:-2])
        return torch.Size((*leading, self.left.shape[-2], self.right.shape[-1]))

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        return MatrixProduct(self.left.map(function), self.right.map(function))

    def _select(self, index: LeadingIndex) -> LinearMap:
        parts = (
            each._select(fit_index(index, each.shape, self.shape))
            for each in (self.left, self.right)
        )
        return MatrixProduct(*parts)

    def _part(self, rows: range, columns: range) -> Tensor:
        inner = range(self.left.shape[-1])
        if len(rows) <= len(columns):
            block = self.left._part(rows, inner)
            product = self.right._transposed_times(block.mT).mT
            return product[..., columns.start : columns.stop : columns.step]
        product = self.left._times(self.right._part(inner, columns))
        return product[..., rows.start : rows.stop : rows.step, :]

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        if transposed:
            return self.right._transposed_times(self.left._transposed_times(x))
        return self.left._times(self.right._times(x))

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"MatrixProduct({self.left!r} @ {self.right!r})"


class ScaledRows(DerivedMatrix):
    """A lazy matrix with each row times one number, such as ``A / A.sum(-1, keepdim=True)``.

    Attributes:
        of: the matrix.
        factors: (..., rows, 1) or (..., 1, 1), with as many axes as the matrix, in its accumulation
            dtype; leading axes broadcast.
    """

    def __init__(self, of: LinearMap, factors: Tensor) -> None:
        self.like = self.of = of
        self.factors = factors

    @property
    def shape(self) -> torch.Size:
        return _joint_shape(self.of.shape, self.factors.shape)

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        of = self.of.map(function)
        return ScaledRows(of, function(self.factors).to(accumulation_dtype(of.dtype)))

    def _select(self, index: LeadingIndex) -> LinearMap:
        of = self.of._select(fit_index(index, self.of.shape, self.shape))
        return ScaledRows(of, select_leading(self.factors, index, self.shape))

    def _part(self, rows: range, columns: range) -> Tensor:
        factors = self.factors
        if factors.shape[-2] > 1:
            factors = factors[..., rows.start : rows.stop : rows.step, :]
        return (self.of._part(rows, columns) * factors).to(self.dtype)

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        if transposed:
            return self.of._transposed_times((x * self.factors).to(self.dtype))
        return (self.of._times(x) * self.factors).to(self.dtype)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"ScaledRows(of {self.of!r})"


class TensorMatrix(DerivedMatrix):
    """A tensor as a summand of lazy matrices, such as ``torch.eye(n)``.

    Attributes:
        numbers: (..., rows, columns).
    """

    def __init__(self, numbers: Tensor) -> None:
        self.like = self.numbers = numbers

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearMap:
        return TensorMatrix(function(self.numbers))

    def _select(self, index: LeadingIndex) -> LinearMap:
        return TensorMatrix(self.numbers[index])

    def _part(self, rows: range, columns: range) -> Tensor:
        rows_of = self.numbers[..., rows.start : rows.stop : rows.step, :]
        return rows_of[..., columns.start : columns.stop : columns.step]

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        with without_autocast(self.device):
            return (self.numbers.mT if transposed else self.numbers) @ x

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"TensorMatrix({shape_text(self.shape)})"


_REFLECTED: dict[str, Callable[[Tensor, LinearMap], Any]] = {
    "add": lambda tensor, matrix: matrix + tensor,
    "mul": lambda tensor, matrix: matrix * tensor,
    "sub": lambda tensor, matrix: matrix.__rsub__(tensor),
}
"""The operators with a tensor on the left that a lazy matrix answers."""


def _combined(*terms: tuple[Any, float | Tensor]) -> LinearMap:
    """Return a weighted sum of lazy matrices, tensors and zeros."""
    matrices = [matrix for matrix, _ in terms if isinstance(matrix, LinearMap)]
    parts: list[tuple[LinearMap, float | Tensor]] = []
    for matrix, factor in terms:
        if isinstance(matrix, Real) and matrix == 0:  # as in sum(matrices)
            continue
        part = matrix if isinstance(matrix, LinearMap) else _summand(matrix, matrices[0])
        _check_alike(matrices[0], part)
        same = part.shape[-2:] == matrices[0].shape[-2:]
        if not same or not _do_broadcast(matrices[0].shape, part.shape):
            raise ValueError(
                f"the matrix has shape {shape_text(matrices[0].shape)}, and what is added has "
                f"{shape_text(part.shape)}; queries and keys must be as many, and leading axes "
                "must broadcast.\n    Take the mean over the heads first, A.mean(1)."
            )
        if isinstance(part, LinearCombination):
            parts += [(each, own * factor) for each, own in part.terms]
        else:
            parts.append((part, factor))
    ndim = max(part.ndim for part, _ in parts)
    return LinearCombination(tuple((part.with_axes(ndim), factor) for part, factor in parts))


def _summand(other: Any, matrix: LinearMap) -> LinearMap:
    """Return a tensor that is added to a matrix, as a lazy matrix."""
    if isinstance(other, Tensor) and other.shape[-2:] == matrix.shape[-2:]:
        return TensorMatrix(other)
    came = kind_text(other)
    if isinstance(other, Tensor):
        came = f"a tensor of shape {shape_text(other.shape)}"
    raise TypeError(
        f"{came} is added to {with_article(type(matrix).__name__)} of shape "
        f"{shape_text(matrix.shape)}; a lazy matrix takes matrices and tensors with all its "
        "queries and keys.\n    For a residual connection add torch.eye(tokens), or use "
        "regard.rollout(layers); for an entropy use A.entropy()."
    )


def _factor(other: Any) -> float | Tensor:
    """Return a number, or a tensor without axes, that multiplies a matrix."""
    if isinstance(other, Tensor) and not other.ndim:
        return other
    if isinstance(other, Real):
        return float(other)
    raise TypeError(
        f"a lazy matrix is multiplied by {kind_text(other)}; it takes numbers and tensors.\n"
        "    For the product of two matrices use A @ B, for weights of their entries "
        "regard.weighted_sum(A, weight)."
    )


def _scaled(matrix: LinearMap, factors: Tensor) -> LinearMap:
    """Return the matrix with its rows, its columns, or single matrices times a factor each."""
    check_same_device("the factor", factors.device, "the matrix", matrix.device, "to(A.device)")
    of_columns = factors.ndim == 1 or factors.shape[-2] == 1
    fits = (of_columns or factors.shape[-1] == 1) and _do_broadcast(matrix.shape, factors.shape)
    if not fits or _joint_shape(matrix.shape, factors.shape)[-2:] != matrix.shape[-2:]:
        raise ValueError(
            f"the factors have shape {shape_text(factors.shape)}, and the matrix has "
            f"{shape_text(matrix.shape)}; a lazy matrix takes one factor for each row, "
            "(..., q_len, 1), or for each column, (..., 1, kv_len).\n"
            "    For weights of single entries use regard.weighted_sum(A, weight), or multiply a "
            "part."
        )
    if factors.shape[-1] > 1:
        return _scaled(matrix.T, factors.unsqueeze(0).mT if factors.ndim == 1 else factors.mT).T
    ndim = max(matrix.ndim, factors.ndim)
    factors = factors[(None,) * (ndim - factors.ndim)]
    return ScaledRows(matrix.with_axes(ndim), factors)


def _check_alike(first: LinearMap, second: LinearMap) -> None:
    """Raise an error unless two matrices have one dtype and one device."""
    check_same_dtype(
        "the second matrix", second.dtype, "the first", first.dtype, f"to({first.dtype})"
    )
    check_same_device(
        "the second matrix", second.device, "the first", first.device, f"to({str(first.device)!r})"
    )


def _joint_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape that shapes broadcast to."""
    # torch.broadcast_shapes would import sympy.
    ndim = max(map(len, shapes))
    aligned = ((*(1,) * (ndim - len(shape)), *shape) for shape in shapes)
    return torch.Size([max(sizes) for sizes in zip(*aligned, strict=True)])


def _do_broadcast(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return True if tensors of two shapes broadcast."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return all(n == m or 1 in (n, m) for n, m in pairs)


def times_batches(
    operand: Tensor, side: tuple[int, ...], times: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the product with an operand that may have more batch axes than the matrix.

    Batches along the additional axes share the weights of the matrix. They are concatenated along
    the last axis of one operand, so that the weights are computed once.

    Args:
        operand: (..., tokens, dim) or (tokens,).
        side: (*leading axes of the matrix, tokens), where tokens is the length that the operand
            must have: kv_len for A @ x, q_len for A.T @ x.
        times: computes the product with an operand that broadcasts to the matrix, and raises an
            error for any other operand.
    """
    if operand.shape[:-1] == side:
        return times(operand)
    *leading, tokens = side
    batches = operand.shape[:-2]
    extra, missing = max(0, len(batches) - len(leading)), max(0, len(leading) - len(batches))
    aligned = [1] * extra + leading[missing:]
    pairs = list(zip(batches, aligned, strict=True))
    wide = [axis for axis, (n, own) in enumerate(pairs) if axis < extra or (own == 1 and n > 1)]
    fits = 0 not in batches and all(own == 1 or own % n == 0 for n, own in pairs)
    if not wide or not fits or operand.shape[-2] != tokens:
        return times(operand)
    beside = tuple(range(-1 - len(wide), -1))
    folded = operand.movedim(wide, beside)  # (..., tokens, *wide, dim)
    lengths = folded.shape[beside[0] :]
    folded = folded.flatten(beside[0])
    kept = [axis - extra for axis in wide if axis >= extra]  # where the matrix has an axis of 1
    for axis in kept:
        folded = folded.unsqueeze(axis)
    product = cast(Tensor, times(folded).unflatten(-1, lengths))
    product = product.squeeze([axis + missing for axis in kept])
    return product.movedim(beside, [axis + missing for axis in wide])
