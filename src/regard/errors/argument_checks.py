"""Checks of arguments: operands, indices, counts, spans, paths and memory limits."""

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from regard.errors.formatting import bytes_text, dtype_text, kind_text, shape_text

GIB = 2**30
DENSE_LIMIT = 4 * GIB


def check_path(path: object) -> Path:
    """Return the path of a file that may not exist yet.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, or contains a null character.

    Example:
        >>> check_path("run.safetensors").name
        'run.safetensors'
    """
    example = 'Pass for example path="run.safetensors".'
    is_path = isinstance(path, str | os.PathLike)
    text = os.fspath(cast("str | os.PathLike[str] | os.PathLike[bytes]", path)) if is_path else None
    if not isinstance(text, str):
        raise TypeError(f"path is {kind_text(path)}; it must be the path of a file.\n    {example}")
    if not text:
        raise ValueError(f"path is empty; it must be the path of a file.\n    {example}")
    if "\0" in text:
        raise ValueError(
            f"path is {text!r}, with a null character; no file has one in its name.\n    {example}"
        )
    return Path(text)


def check_product(name: str, operand: object, dtype: torch.dtype) -> Tensor:
    """Return the operand of a product with a matrix of this dtype.

    Raises:
        TypeError: it is not a tensor, or of another dtype.
    """
    if not isinstance(operand, Tensor):
        raise TypeError(
            f"{name} is {kind_text(operand)}; an attention matrix multiplies tensors.\n"
            f"    Use torch.as_tensor({name}); for a second matrix B use A @ (B @ x)."
        )
    check_same_dtype(name, operand.dtype, "the matrix", dtype, f"{name}.to({dtype})")
    return operand


def is_sharded(value: object) -> bool:
    """Return True for a DTensor; PyTorch imports that class only where it is used."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def refuse_sharded(name: str, value: object) -> None:
    """Raise an error for a DTensor.

    Raises:
        TypeError: the value is a DTensor.
    """
    if is_sharded(value):
        raise TypeError(
            f"{name} is a DTensor, which lies on several processes; it must be an ordinary "
            f"tensor.\n    Use {name}.full_tensor() for the whole of it, or {name}.to_local() "
            "for the part of this process."
        )


def check_same_dtype(
    name: str, dtype: torch.dtype, other: str, expected: torch.dtype, remedy: str
) -> None:
    """Raise an error unless two arguments have one dtype.

    Args:
        name: the argument at fault.
        dtype: its dtype.
        other: the argument that it must agree with.
        expected: the dtype of ``other``.
        remedy: the code that converts the argument.

    Raises:
        TypeError: the dtypes differ.
    """
    if dtype != expected:
        raise TypeError(
            f"{name} is {dtype_text(dtype)} and {other} is {dtype_text(expected)}; "
            f"both must have one dtype.\n    Use {remedy}."
        )


def check_same_device(
    name: str, device: torch.device, other: str, expected: torch.device, remedy: str
) -> None:
    """Raise an error unless two arguments are on one device; see ``check_same_dtype`` for Args.

    Raises:
        ValueError: the devices differ.
    """
    if device != expected:
        raise ValueError(
            f"{name} is on {device} and {other} is on {expected}; "
            f"both must be on one device.\n    Use {remedy}."
        )


def check_operand(
    name: str, operand: Tensor, length_name: str, shape: Sequence[int], device: torch.device
) -> None:
    """Raise an error unless the operand of a product has a shape and device that fit the matrix.

    Args:
        name: the argument.
        operand: (..., tokens, value_dim) or (tokens,).
        length_name: "q_len" or "kv_len".
        shape: (*leading axes of the matrix, tokens), where tokens is the length that the operand
            must have, q_len or kv_len.
        device: the device of the matrix.

    Raises:
        ValueError: the tokens, the leading axes or the device do not fit.
    """
    refuse_sharded(name, operand)
    check_same_device(name, operand.device, "the matrix", device, f"{name}.to(A.device)")
    *full, length = shape
    *leading, tokens = operand.shape[:-1] or operand.shape or (None,)
    if 0 in operand.shape:
        wrong = "every axis must be at least 1"
    elif tokens != length:
        wrong = f"its tokens axis must have {length_name} = {length}"
    elif not _leading_fit(leading, full):
        wrong = f"its leading axes must fit those of the matrix, {shape_text(full)}"
    else:
        return
    grouped = ", where heads may be grouped" if wrong.startswith("its leading") else ""
    raise ValueError(
        f"{name} has shape {shape_text(operand.shape)}; {wrong}.\n"
        f"    It must broadcast to ({', '.join(map(str, shape))}, value_dim){grouped}."
    )


def check_numbers(call: str, device: torch.device) -> None:
    """Raise an error if a call would read tensors of the meta device, which have no numbers.

    Raises:
        ValueError: the device is the meta device.
    """
    if device.type == "meta":
        raise ValueError(
            f"{call} has tensors on the meta device; it needs their numbers, and there they have "
            "none.\n    Create them on another device."
        )


def _leading_fit(leading: Sequence[int], full: Sequence[int]) -> bool:
    """Return True if leading axes broadcast to those of the matrix; heads may be grouped."""
    pairs = enumerate(zip(leading[::-1], full[::-1], strict=False))
    return len(leading) <= len(full) and all(
        got in (1, of_matrix) or (axis == 0 and of_matrix % got == 0)
        for axis, (got, of_matrix) in pairs
    )


_SMALLER = (
    "Ask for a part, A[..., rows, cols], or for a summary, A.pool(512, 512), "
    "or pass limit=None to to_dense()."
)


def check_memory(
    what: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    limit: int | None = DENSE_LIMIT,
    remedy: str = _SMALLER,
) -> None:
    """Raise an error if a dense tensor would exceed a limit.

    Args:
        what: the call that would create it.
        shape: its shape.
        dtype: its dtype.
        limit: the maximum number of bytes; None for no limit.
        remedy: what to do instead.

    Raises:
        TypeError: the limit is not a whole number.
        MemoryError: the tensor would exceed the limit; the message states the size of the tensor.
    """
    if limit is not None and not is_whole(limit):
        raise TypeError(
            f"limit is {kind_text(limit)}; it must be a whole number of bytes, or None.\n"
            "    Pass for example limit=8 * 2**30."
        )
    size = dtype.itemsize * prod(shape)
    if limit is None or size <= limit:
        return
    raise MemoryError(
        f"{what} would make {shape_text(shape)} {dtype_text(dtype)} = {_gib(size)}; "
        f"the limit is {_gib(limit)}.\n    {remedy}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else bytes_text(size)


def check_index_bounds(index: int, length: int, axis: int) -> int:
    """Return an index as counted from the start of the axis.

    Raises:
        IndexError: it lies outside the axis.
    """
    if not -length <= index < length:
        raise IndexError(
            f"index {index} is out of range for axis {axis} of length {length}.\n"
            f"    Use {-length} to {length - 1}."
        )
    return index % length


def is_whole(value: object) -> bool:
    """Return True if value is a Python or NumPy integer; bools do not count."""
    try:
        index(cast(SupportsIndex, value))
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_whole(name: str, value: object) -> int:
    """Return value as an int.

    Raises:
        TypeError: it is not a whole number.
    """
    if is_whole(value):
        return index(cast(SupportsIndex, value))
    raise TypeError(
        f"{name} is {kind_text(value)}; it must be a whole number.\n"
        f"    Pass an int, for example {name}=1."
    )


def check_count(name: str, value: object) -> int:
    """Return value as an int of at least 1.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below 1.
    """
    count = check_whole(name, value)
    if count < 1:
        raise ValueError(
            f"{name} is {count}; it must be at least 1.\n    Pass for example {name}=1."
        )
    return count


def check_number(name: str, value: object, remedy: str, wanted: str = "a number") -> float:
    """Return value as a float.

    Args:
        name: the argument.
        value: its value.
        remedy: a sentence that says what to pass.
        wanted: what the argument must be.

    Raises:
        TypeError: it is neither an int nor a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {kind_text(value)}; it must be {wanted}.\n    {remedy}")
    return float(value)


def check_progress(progress: object, numbers: str = "two numbers, done and total") -> None:
    """Raise an error unless ``progress`` is a function or None.

    Args:
        progress: the argument.
        numbers: the numbers that the function is called with.

    Raises:
        TypeError: it cannot be called.
    """
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress is {kind_text(progress)}; it must be a function of {numbers}.\n"
            "    Pass for example progress=print."
        )


def check_cancelled(cancelled: object) -> None:
    """Raise an error unless ``cancelled`` is a function or None.

    Raises:
        TypeError: it cannot be called.
    """
    if cancelled is not None and not callable(cancelled):
        raise TypeError(
            f"cancelled is {kind_text(cancelled)}; it must be a function without arguments that "
            "returns True to end the work.\n    Pass for example cancelled=event.is_set."
        )


def _are_spans(pairs: Sequence[Any], length: int) -> bool:
    """Return True if all are tuples of two ints, start and stop, of spans inside a length."""
    if {*map(type, pairs)} != {tuple} or {*map(len, pairs)} != {2}:
        return False
    are_ints = {*map(type, chain.from_iterable(pairs))} == {int}
    return are_ints and all(0 <= start < stop <= length for start, stop in pairs)


def check_spans(name: str, spans: object, length_name: str, length: int) -> list[tuple[int, int]]:
    """Return spans as a list of (start, stop) pairs.

    Args:
        name: the argument.
        spans: a sequence of pairs with 0 <= start < stop <= length, or a mapping whose values are
            such pairs.
        length_name: "q_len" or "kv_len".
        length: the length of the text in tokens.

    Raises:
        TypeError: they are not pairs of whole numbers.
        ValueError: there are none, or one is empty or reaches beyond the text.
    """
    remedy = f"    Give (start, stop) pairs with 0 <= start < stop <= {length_name} = {length}."
    if isinstance(spans, Mapping):
        spans = list(cast(Mapping[Any, Any], spans).values())
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise TypeError(f"{name} is {kind_text(spans)}; it must be (start, stop) pairs.\n{remedy}")
    pairs = cast(Sequence[Any], spans)
    if not pairs:
        raise ValueError(f"{name} is empty; it must have at least one span.\n{remedy}")
    if _are_spans(pairs, length):  # each strip of a long text checks thousands
        return list(pairs)
    checked: list[tuple[int, int]] = []
    for pair in pairs:
        edges = list(cast(Sequence[Any], pair)) if isinstance(pair, Sequence) else []
        if list(map(is_whole, edges)) != [True, True]:
            raise TypeError(f"{name} has {pair!r}; each span must be two whole numbers.\n{remedy}")
        start, stop = int(edges[0]), int(edges[1])
        if not 0 <= start < stop <= length:
            raise ValueError(
                f"{name} has {(start, stop)}; each span must be non-empty and inside the text.\n"
                f"{remedy}"
            )
        checked.append((start, stop))
    return checked
