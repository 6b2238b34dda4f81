"""Lazy matrices that multiply tensors: the abstract class and the transposed matrix.

``A @ x``, ``x @ A``, ``A.T @ x`` and ``torch.matmul`` behave as for a tensor of the same shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from regard.errors import DENSE_LIMIT, shape_text, with_article
from regard.scores.autocast import autocast_dtype

_EAGER = "within a graph write torch.matmul(A, x) for A @ x"


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
    """A lazy matrix, defined by its products with tensors."""

    _instead = "a method of the matrix"

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
    def _times(self, value: Tensor) -> Tensor:
        """Return self @ value."""

    @abstractmethod
    def _transposed_times(self, operand: Tensor) -> Tensor:
        """Return self.T @ operand."""

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

    @property
    def mT(self) -> "LinearMap":
        """The same as ``T``, under the name that tensors with leading axes use."""
        return self.T

    def __matmul__(self, value: Tensor) -> Tensor:
        """Return self @ value, an ordinary tensor; leading axes broadcast as in ``torch.matmul``.

        Under autocast the value may be of another dtype, and the product has autocast's dtype.
        """
        return self._cast(value, lambda value: _watched(self, value, lambda: self._times(value)))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run torch.matmul(A, value), x @ A and torch.stack; refuse other functions of PyTorch.

        ``torch.stack([A, B])`` forms the matrices, as many tools for small texts expect.
        """
        if func in (torch.matmul, Tensor.matmul) and len(args) == 2 and not kwargs:
            left, right = args
            if isinstance(left, LinearMap):
                return left.__matmul__(right)  # Dynamo hands `left @ right` to this method
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
        raise TypeError(
            f"torch.{func.__name__} does not take {with_article(cls.__name__)}; "
            "only torch.matmul and torch.stack do.\n"
            f"    Use {cls._instead}, a part such as A[0, 3, :10], or to_dense()."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse NumPy, which would make an array of one object.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"NumPy does not take {with_article(type(self).__name__)}; it holds no numbers.\n"
            "    Use to_dense().numpy(), or tensors in products: A @ torch.as_tensor(x)."
        )

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

    def _times(self, value: Tensor) -> Tensor:
        return self.of._transposed_times(value)

    def _transposed_times(self, operand: Tensor) -> Tensor:
        return self.of._times(operand)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"TransposedMatrix(of {self.of!r})"


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
