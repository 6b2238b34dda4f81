"""The methods of ``torch.Tensor`` that lazy matrices have, and what to write in place of others.

They use nothing of a matrix but its shape, its products, its index and its sums over leading axes.
No method forms a matrix.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import add, mul, sub
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from regard.errors import check_count, check_whole, shape_text, with_article
from regard.reductions.top_k import Top
from regard.scores.autocast import without_autocast

if TYPE_CHECKING:
    from regard.matrix.linear_map import LinearMap

Axes: TypeAlias = "int | Sequence[int] | None"
"""An axis, several, or None for all."""

_P = ParamSpec("_P")

AT_ONCE = 2**20
"""The number of entries of a matrix that exist at once while it is read block by block."""


def tensor_attribute(matrix: "LinearMap", name: str) -> Any:
    """Return an attribute that tensors have, for a lazy matrix.

    Raises:
        AttributeError: there is none; for a name of ``torch.Tensor`` with what to write instead.
    """
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name](matrix)
    if hasattr(Tensor, name):
        kind = with_article(type(matrix).__name__)
        raise AttributeError(
            f"{kind} has no {name}; it holds no numbers.\n    {remedy(matrix, name)}",
            name=name,
            obj=matrix,
        )
    return object.__getattribute__(matrix, name)  # raises Python's own error


def remedy(matrix: "LinearMap | type[LinearMap]", name: str) -> str:
    """Return what to write in place of a function or method of tensors."""
    for names, text in _REMEDIES.items():
        if name in names.split():
            return text
    return f"Use {matrix.instead}, a part such as A[0, 3, :10], or to_dense()."


def sum_over(
    matrix: "LinearMap",
    sums: Callable[[int], Tensor],
    dim: Axes,
    keepdim: bool = False,
    *,
    is_mean: bool = False,
) -> Any:
    """Return the sum or the mean of a matrix over some axes, as ``Tensor.sum`` does.

    The sum over leading axes is a lazy matrix. A sum over queries or keys costs one pass.

    Args:
        matrix: the matrix.
        sums: returns the sums over the keys, for -1, or over the queries, for -2.
        dim: the axes; None for all.
        keepdim: True if the axes stay, with length 1.
        is_mean: True for the mean.

    Raises:
        TypeError: an axis is not a whole number.
        ValueError: there is no such axis.
    """
    axes = _axes(matrix, dim)
    count = prod(matrix.shape[axis] for axis in axes) if is_mean else 1
    if axes[0] < matrix.ndim - 2:
        for axis in axes:
            matrix = matrix.sum_leading(axis, matrix.shape[axis] if is_mean else 1)
            matrix = _unsqueeze(matrix, axis) if keepdim else matrix
        return matrix
    numbers = sums(axes[0] - matrix.ndim).unsqueeze(axes[0])
    numbers = numbers.sum(axes[1:], keepdim=True) if len(axes) > 1 else numbers
    numbers = numbers / count if is_mean else numbers
    return numbers if keepdim else numbers.squeeze(axes)


def squeeze(matrix: "LinearMap", dim: int | None = None) -> Any:
    """Return the matrix without axes of length 1, as ``Tensor.squeeze`` does.

    Without the axis of queries or keys it is a tensor.

    Raises:
        ValueError: dim is the axis of several queries or keys, or no axis.
    """
    shape = matrix.shape
    if dim is None:
        return matrix[tuple(0 if length == 1 else slice(None) for length in shape)]
    is_axis = -matrix.ndim <= check_whole("dim", dim) < matrix.ndim
    if not is_axis or (dim % matrix.ndim >= matrix.ndim - 2 and shape[dim] != 1):
        raise ValueError(
            f"dim is {dim}; the matrix has shape {shape_text(shape)}, and its last two axes stay.\n"
            "    Take a row, A[..., 0, :], or a column, A[..., :, 0]."
        )
    return matrix[(*(slice(None),) * (dim % matrix.ndim), 0)] if shape[dim] == 1 else matrix


def check_keys(matrix: "LinearMap", name: str, dim: int | None) -> None:
    """Raise an error unless a method is asked for the keys, dim=-1.

    Raises:
        TypeError: dim is not a whole number.
        ValueError: dim is another axis, or None.
    """
    if dim is None or check_whole("dim", dim) not in (-1, matrix.ndim - 1):
        raise ValueError(
            f"{name}() has dim={dim}, and the matrix has shape {shape_text(matrix.shape)}; it is "
            "over the keys, dim=-1.\n"
            f"    Over other axes use it on a part, such as A[..., :10, :].{name}(dim), or use the "
            "mean, A.mean(1), or a picture, A.pool(64, 64)."
        )


def _axes(matrix: "LinearMap", dim: Axes) -> list[int]:
    """Return axes counted from the first, in falling order."""
    several = range(matrix.ndim) if dim is None else dim
    several = several if isinstance(several, Sequence) else (several,)
    axes = {check_whole("dim", axis) for axis in several}
    if not axes or not all(-matrix.ndim <= axis < matrix.ndim for axis in axes):
        raise ValueError(
            f"dim is {dim}; the matrix has shape {shape_text(matrix.shape)}.\n"
            f"    Use axes from {-matrix.ndim} to {matrix.ndim - 1}."
        )
    return sorted({axis % matrix.ndim for axis in axes}, reverse=True)


def _by_products(matrix: "LinearMap") -> Callable[[int], Tensor]:
    """Return the sums of a matrix over its keys or queries, each a product with ones."""

    def sums(axis: int) -> Tensor:
        ones = torch.ones(matrix.shape[axis], dtype=matrix.dtype, device=matrix.device)
        with without_autocast(matrix.device):
            return (matrix if axis == -1 else matrix.T) @ ones

    return sums


def _sum(matrix: "LinearMap", dim: Axes = None, keepdim: bool = False, *, axis: Axes = None) -> Any:
    dim = dim if axis is None else axis
    return sum_over(matrix, _by_products(matrix), dim, keepdim)


def _mean(
    matrix: "LinearMap", dim: Axes = None, keepdim: bool = False, *, axis: Axes = None
) -> Any:
    dim = dim if axis is None else axis
    return sum_over(matrix, _by_products(matrix), dim, keepdim, is_mean=True)


def _by_rows(matrix: "LinearMap", answer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Top:
    """Return an answer about each row, (..., rows, k), of blocks of rows that are tensors."""
    *leading, rows, columns = matrix.shape
    step = max(1, AT_ONCE // (prod(leading) * columns))

    def of_block(start: int) -> tuple[Tensor, Tensor]:
        return answer(matrix[..., start : start + step, :])

    if torch.is_grad_enabled() and _requires_grad(matrix):
        # Autograd would keep every block.
        again = partial(cast(Any, checkpoint), use_reentrant=False, preserve_rng_state=False)
        blocks = [again(of_block, start) for start in range(0, rows, step)]
    else:
        blocks = [of_block(start) for start in range(0, rows, step)]
    values, indices = (torch.cat(parts, -2) for parts in zip(*blocks, strict=True))
    return Top(values, indices)


def _extreme(name: str) -> Callable[..., Any]:
    """Return ``Tensor.max`` or ``Tensor.min`` for matrices: over the keys, or the whole matrix."""

    def extreme(
        matrix: "LinearMap",
        dim: int | None = None,
        keepdim: bool = False,
        *,
        axis: int | None = None,
    ) -> Any:
        dim = dim if axis is None else axis
        if dim is not None:
            check_keys(matrix, name, dim)
        top = _by_rows(matrix, lambda rows: getattr(rows, name)(-1, keepdim=True))
        if dim is None:
            return getattr(top.values, name)()
        return top if keepdim else Top(top.values.squeeze(-1), top.indices.squeeze(-1))

    return extreme


def _part_of_extreme(name: str, of: str, part: int) -> Callable[..., Tensor]:
    """Return ``Tensor.amax``, ``argmax``, ``amin`` or ``argmin`` over the keys."""

    def chosen(
        matrix: Any, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None
    ) -> Tensor:
        dim = dim if axis is None else axis
        check_keys(matrix, name, dim)
        return getattr(matrix, of)(dim, keepdim)[part]

    return chosen


def _topk(matrix: "LinearMap", k: int, dim: int = -1) -> Top:
    check_keys(matrix, "topk", dim)
    if check_count("k", k) > matrix.shape[-1]:
        raise ValueError(
            f"k is {k}; it must be at most kv_len = {matrix.shape[-1]}.\n"
            f"    Use topk(min(k, {matrix.shape[-1]}))."
        )
    return _by_rows(matrix, lambda rows: rows.topk(k))


def _unsqueeze(matrix: "LinearMap", dim: int) -> Any:
    axis = check_whole("dim", dim) + (matrix.ndim + 1 if dim < 0 else 0)
    if not 0 <= axis <= matrix.ndim - 2:
        raise ValueError(
            f"dim is {dim}; the matrix has shape {shape_text(matrix.shape)}, and its last two axes "
            "stay queries and keys.\n"
            "    Take a part first, such as A[..., 0, :], and use unsqueeze on it."
        )
    return matrix[(*(slice(None),) * axis, None)]


def _at(matrix: "LinearMap", dim: int, item: Any) -> Any:
    """Return the part at an index of one axis."""
    (axis,) = _axes(matrix, dim)
    return matrix[(*(slice(None),) * axis, item)]


def _narrow(matrix: "LinearMap", dim: int, start: int, length: int) -> Any:
    return _at(matrix, dim, slice(start, start + length))


def _unbind(matrix: "LinearMap", dim: int = 0) -> tuple[Any, ...]:
    return tuple(_at(matrix, dim, index) for index in range(matrix.size(dim)))


def _permute(matrix: "LinearMap", *dims: Any) -> Any:
    order = _flat(dims)
    axes = [check_whole("dim", axis) % matrix.ndim for axis in order]
    *leading, queries, keys = range(matrix.ndim)
    if axes == [*leading, queries, keys]:
        return matrix
    if axes == [*leading, keys, queries]:
        return matrix.T
    raise ValueError(
        f"the axes are {shape_text(axes)} of a matrix of shape {shape_text(matrix.shape)}; leading "
        "axes stay, and only queries and keys may be exchanged.\n"
        "    Use A.mT, or permute a part, such as A[..., :10, :10], or to_dense()."
    )


def _transpose(matrix: "LinearMap", dim0: int, dim1: int) -> Any:
    axes = list(range(matrix.ndim))
    first, second = (check_whole("dim", dim) % matrix.ndim for dim in (dim0, dim1))
    axes[first], axes[second] = axes[second], axes[first]
    return _permute(matrix, axes)


def _reshape(matrix: "LinearMap", *sizes: Any) -> Any:
    wanted = _flat(sizes)
    try:
        shape = torch.empty(matrix.shape, device="meta").reshape(wanted).shape
    except (RuntimeError, TypeError):  # the sizes fit no tensor of this shape
        shape = None
    if shape is None or (_without_ones(shape), shape[-2:]) != (
        _without_ones(matrix.shape),
        matrix.shape[-2:],
    ):
        raise ValueError(
            f"the new shape is {shape_text(wanted)}; a matrix of shape {shape_text(matrix.shape)} "
            "gains and loses leading axes of length 1 alone.\n"
            "    Take one text, A[0], or the mean over the heads, A.mean(1), or reshape a part."
        )
    kept = matrix[(*(0 if length == 1 else slice(None) for length in matrix.shape[:-2]), ...)]
    return kept[(*(None if length == 1 else slice(None) for length in shape[:-2]), ...)]


def _flat(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the numbers of ``f(1, 2)`` or ``f((1, 2))``."""
    several = len(numbers) == 1 and isinstance(numbers[0], Sequence)
    return tuple(cast(Sequence[Any], numbers[0])) if several else numbers


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [length for length in shape[:-2] if length != 1]


def _to(matrix: "LinearMap", *args: Any, **kwargs: Any) -> Any:
    return matrix.map(lambda tensor: tensor.to(*args, **kwargs))


def _cuda(matrix: Any, device: Any = "cuda") -> Any:
    return matrix.to(device)


def _type_as(matrix: Any, other: Any) -> Any:
    return matrix.to(other.dtype)


def _matmul(matrix: "LinearMap", other: Any) -> Any:
    return matrix @ other


def _divide(matrix: "LinearMap", other: Any) -> Any:
    return matrix / other


def _requires_grad(matrix: "LinearMap") -> bool:
    return any(tensor.requires_grad for tensor in mapped_tensors(matrix))


def mapped_tensors(whole: Any) -> list[Tensor]:
    """Return the tensors of a matrix, a source of scores or a mask, in the order of ``map``."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    whole.map(note)
    return tensors


def _in_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda matrix: matrix.to(dtype)


def _method(function: Callable[Concatenate[Any, _P], Any]) -> Callable[[Any], Any]:
    """Return the function that binds a method to a matrix."""
    return lambda matrix: partial(function, matrix)


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "add": _method(add),
    "amax": _method(_part_of_extreme("amax", "max", 0)),
    "amin": _method(_part_of_extreme("amin", "min", 0)),
    "argmax": _method(_part_of_extreme("argmax", "max", 1)),
    "argmin": _method(_part_of_extreme("argmin", "min", 1)),
    "bfloat16": _method(_in_dtype(torch.bfloat16)),
    "bmm": _method(_matmul),
    "clone": _method(lambda matrix: matrix.map(Tensor.clone)),
    "contiguous": _method(lambda matrix: matrix),
    "cpu": _method(lambda matrix: matrix.to("cpu")),
    "cuda": _method(_cuda),
    "data": lambda matrix: matrix.map(Tensor.detach),
    "detach": _method(lambda matrix: matrix.map(Tensor.detach)),
    "dim": _method(lambda matrix: matrix.ndim),
    "div": _method(_divide),
    "double": _method(_in_dtype(torch.float64)),
    "float": _method(_in_dtype(torch.float32)),
    "half": _method(_in_dtype(torch.float16)),
    "index_select": _method(_at),
    "is_cuda": lambda matrix: matrix.device.type == "cuda",
    "is_floating_point": _method(lambda _: True),
    "matmul": _method(_matmul),
    "max": _method(_extreme("max")),
    "mean": _method(_mean),
    "min": _method(_extreme("min")),
    "mul": _method(mul),
    "narrow": _method(_narrow),
    "ndimension": _method(lambda matrix: matrix.ndim),
    "nelement": _method(lambda matrix: matrix.shape.numel()),
    "numel": _method(lambda matrix: matrix.shape.numel()),
    "permute": _method(_permute),
    "requires_grad": _requires_grad,
    "reshape": _method(_reshape),
    "select": _method(_at),
    "squeeze": _method(squeeze),
    "sub": _method(sub),
    "sum": _method(_sum),
    "swapaxes": _method(_transpose),
    "swapdims": _method(_transpose),
    "to": _method(_to),
    "topk": _method(_topk),
    "transpose": _method(_transpose),
    "true_divide": _method(_divide),
    "type_as": _method(_type_as),
    "unbind": _method(_unbind),
    "unsqueeze": _method(_unsqueeze),
    "view": _method(_reshape),
}
"""The attributes of tensors that every lazy matrix has, if it does not define them itself."""

_REMEDIES = {
    "numpy tolist item": "Use to_dense().numpy() for a small matrix, or a part, such as "
    "A[0, 3, :10].numpy().",
    "gt ge lt le eq ne where masked_fill masked_select masked_fill_": "Use a part, such as "
    "A[0, 3, :10] > 0.1, or multiply rows or columns by 0 or 1, A * keep[:, None].",
    "isnan isinf isfinite nan_to_num": "Use A.sum(-1).isnan(); the sum of a row with NaN is NaN.",
    "log log2 log10 log_softmax logsumexp": "Use A.entropy(), or A.scores and A.logsumexp().",
    "softmax": "Rows of attention sum to 1 already; use A[0, 3, :10] for some of them.",
    "std var std_mean var_mean norm": "Use A.entropy() or A.max() to see how sharp each row is, or "
    "a part, such as A[0, 3, :10].std().",
    "sort argsort msort kthvalue median quantile": "Use A.topk(8), or a part, such as "
    "A[0, 3, :10].sort().",
    "interpolate upsample avg_pool2d max_pool2d adaptive_avg_pool2d": "Use A.pool(64, 64).",
    "cat concat concatenate hstack vstack": "Keep the matrices in a list, or use torch.stack, "
    "which forms matrices of up to 4 GiB.",
    "einsum": "Use A @ value, A.T @ x, A.mean(1) and A.sum(-2).",
    "flatten unflatten expand repeat tile": "Take one text or head, A[0, 3], or reshape a part.",
    "triu tril": "Pass mask=regard.Causal() to attend, or use A.diagonal(offset).",
    "max min": "Use A.max(-1) for each row, and A.max(-1).values.max() for the whole matrix.",
    "requires_grad_ backward grad grad_fn retain_grad": "Gradients flow to query and key; "
    "use A.entropy().mean().backward().",
}
