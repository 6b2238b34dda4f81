"""Checks of the tensors and numbers that define a matrix: query, key, scores, weights, bias."""

from math import inf, isfinite

import torch
from torch import Tensor

from regard.errors.argument_checks import (
    check_number,
    check_same_device,
    check_same_dtype,
    is_sharded,
    refuse_sharded,
)
from regard.errors.formatting import dtype_text, kind_text, shape_text

_LAYOUT = "(..., num_heads, tokens, head_dim)"


def check_floating(name: str, value: object, axes: str) -> Tensor:
    """Return value if it is a floating tensor.

    Args:
        name: the argument.
        value: its value.
        axes: the axes that it must have, for the message.

    Raises:
        TypeError: it is not a tensor, or not of a floating dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is {kind_text(value)}; it must be a tensor of shape {axes}.\n"
            f"    Use torch.as_tensor({name})."
        )
    if not value.is_floating_point():
        raise TypeError(
            f"{name} is {dtype_text(value.dtype)}; attention needs a floating dtype.\n"
            f"    Use {name}.float()."
        )
    if value.dtype.itemsize < 2:
        raise TypeError(
            f"{name} is {dtype_text(value.dtype)}; attention needs at least 16 bits.\n"
            f"    Use {name}.bfloat16()."
        )
    if value.layout is not torch.strided:
        raise TypeError(
            f"{name} is a tensor of layout {value.layout}; attention needs a dense tensor.\n"
            f"    Use {name}.to_dense(), or pad nested sequences and pass mask=Padding(lengths)."
        )
    return value


def check_tensor(name: str, value: object, axes: str) -> Tensor:
    """Return value if it is a floating tensor with at least two axes, none of them empty.

    Raises:
        TypeError: it is not a tensor, or not of a floating dtype.
        ValueError: it has fewer than two axes, or an axis of length 0.
    """
    refuse_sharded(name, value)
    return _with_tokens(name, value, axes)


def _with_tokens(name: str, value: object, axes: str) -> Tensor:
    value = check_floating(name, value, axes)
    if value.ndim < 2:
        raise ValueError(
            f"{name} has shape {shape_text(value.shape)}; "
            f"it must have at least two axes, {axes}.\n"
            f"    For one token use {name}[None, :]."
        )
    if 0 in value.shape:
        raise ValueError(
            f"{name} has shape {shape_text(value.shape)}; "
            f"every axis of {axes} must be at least 1.\n"
            "    Leave out empty sequences; PyTorch's attention gives an empty tensor, or zeros "
            "without keys."
        )
    return value


def check_width(name: str, x: object, width_name: str, width: int) -> Tensor:
    """Return x if it is a floating tensor (..., tokens, width).

    Args:
        name: the argument.
        x: its value.
        width_name: the name of the last axis.
        width: the length of the last axis.

    Raises:
        TypeError: it is not a tensor, or not of a floating dtype.
        ValueError: it has fewer than two axes, an empty axis or another width.
    """
    axes = f"(..., tokens, {width_name})"
    x = check_tensor(name, x, axes)
    if x.shape[-1] == width:
        return x
    remedy = f"{name} {shape_text(x.shape)} was read as {axes}."
    if x.shape[-2] == width:
        remedy = f"{name} {shape_text(x.shape)} looks transposed; pass {name}.mT."
    raise ValueError(
        f"{name} has {width_name} {x.shape[-1]}; this layer was made for {width_name} {width}.\n"
        f"    {remedy}"
    )


def check_query_key(query: object, key: object) -> tuple[Tensor, Tensor]:
    """Return query and key if they fit each other.

    Raises:
        TypeError: one is not a floating tensor, or the dtypes differ.
        ValueError: the shapes do not fit, or the devices differ.
    """
    query = _with_tokens("query", query, _LAYOUT)
    key = _with_tokens("key", key, _LAYOUT)
    check_same_dtype("key", key.dtype, "query", query.dtype, "key.to(query.dtype)")
    check_same_device("key", key.device, "query", query.device, "key.to(query.device)")
    if query.ndim != key.ndim:
        raise ValueError(
            f"key has {key.ndim} axes and query has {query.ndim}; the numbers must be equal.\n"
            f"    {_both(query, key)} were read as {_LAYOUT}."
        )
    if query.shape[-1] != key.shape[-1]:
        both = _both(query, key)
        remedy = f"{both} were read as {_LAYOUT}."
        if key.shape[-2] == query.shape[-1]:
            remedy = f"{both}: the key looks transposed; pass key.mT."
        raise ValueError(
            f"key has head_dim {key.shape[-1]} and query has {query.shape[-1]}; "
            f"they must be equal.\n    {remedy}"
        )
    _check_leading(query, key)
    return query, key


def _both(query: Tensor, key: Tensor) -> str:
    """Return both shapes as text, for errors only: torch.compile specialises on shapes it reads."""
    return f"query {shape_text(query.shape)} and key {shape_text(key.shape)}"


def _check_leading(query: Tensor, key: Tensor) -> None:
    if query.ndim == 2:
        return
    for axis, (of_query, of_key) in enumerate(zip(query.shape[:-3], key.shape[:-3], strict=True)):
        if of_query != of_key and 1 not in (of_query, of_key):
            raise ValueError(
                f"key has length {of_key} on axis {axis} and query has {of_query}; "
                "batch axes must be equal or 1.\n"
                f"    {_both(query, key)} were read as {_LAYOUT}."
            )
    num_heads, num_kv_heads = query.shape[-3], key.shape[-3]
    if num_heads % num_kv_heads:
        both = _both(query, key)
        remedy = f"{both} were read as {_LAYOUT}."
        likely = query.ndim > 3 and num_heads > query.shape[-2]  # more tokens than heads
        if likely and query.shape[-2] % key.shape[-2] == 0:
            remedy = (
                f"{both} fit as (..., tokens, num_heads, head_dim): "
                "pass query.transpose(-3, -2) and key.transpose(-3, -2)."
            )
        raise ValueError(
            f"key has {num_kv_heads} heads and query has {num_heads}; "
            "num_heads must be a multiple of num_kv_heads (grouped-query attention).\n"
            f"    {remedy}"
        )


def check_scale(scale: object, head_dim: int) -> float:
    """Return the factor on query·key: ``scale``, or 1/sqrt(head_dim) if ``scale`` is None.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not finite.
    """
    if scale is None:
        return head_dim**-0.5
    remedy = "Leave it out for 1/sqrt(head_dim); pass 1.0 for no scaling."
    number = check_number("scale", scale, remedy)
    if not isfinite(number):
        raise ValueError(
            f"scale is {scale}; it must be finite.\n    Leave it out for 1/sqrt(head_dim)."
        )
    return number


def check_broadcast(
    name: str, tensor: Tensor, shape: torch.Size, device: torch.device, of: str = "query"
) -> Tensor:
    """Return a tensor with as many axes as shape, each equal to that of shape or 1.

    Args:
        name: the argument.
        tensor: its value.
        shape: (..., num_heads, q_len, kv_len).
        device: the device of the matrix.
        of: the argument whose device the error names, such as query.

    Raises:
        ValueError: it does not broadcast to shape, or is on another device.
    """
    refuse_sharded(name, tensor)
    check_same_device(name, tensor.device, f"the {of}", device, f"{name}.to({of}.device)")
    axes = shape_text(shape)
    aligned = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    if len(aligned) == len(shape) and all(
        got in (1, wanted) for got, wanted in zip(aligned, shape, strict=True)
    ):
        return tensor.reshape(aligned)
    remedy = (
        "Its axes are aligned with the last axes of the matrix, (..., num_heads, q_len, kv_len)."
    )
    if len(shape) == 4 and tensor.shape == (shape[0], shape[-1]):
        remedy = f"For padding of shape (batch, kv_len) pass {name}[:, None, None, :]."
    elif len(shape) == 4 and tensor.shape == (shape[0], shape[-2], shape[-1]):
        remedy = f"For one of shape (batch, q_len, kv_len) pass {name}[:, None]."
    raise ValueError(
        f"{name} has shape {shape_text(tensor.shape)}; it must broadcast to {axes}.\n    {remedy}"
    )


def check_bias(bias: object, shape: torch.Size, query: Tensor) -> Tensor | None:
    """Return the numbers to add to the scores, with all axes of the matrix; None for None.

    Raises:
        TypeError: it is not a floating tensor.
        ValueError: it does not broadcast to the matrix, or is on another device.
    """
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        if isinstance(bias, type):
            raise TypeError(
                f"bias is the class {bias.__name__}; it must be an instance.\n"
                f"    Use {bias.__name__}(...)."
            )
        came = dtype_text(bias.dtype) if isinstance(bias, Tensor) else kind_text(bias)
        raise TypeError(
            f"bias is {came}; it must be a floating tensor, numbers added to the scores, or a "
            "position bias such as ALiBi(num_heads).\n"
            "    A bool tensor (True = may attend) goes to mask=, a callable to score_mod=."
        )
    if is_sharded(query) and is_sharded(bias):
        return bias  # ShardedScores checks where it lies
    return check_broadcast("bias", bias, shape, query.device)


def check_softcap(softcap: object) -> float | None:
    """Return the bound of the scores; None for None.

    Raises:
        TypeError: it is not a number.
        ValueError: it is 0, negative or not finite.
    """
    if softcap is None:
        return None
    remedy = "Leave it out for scores without a bound; Gemma 2 has softcap=50.0."
    number = check_number("softcap", softcap, remedy)
    if not 0 < number < inf:
        raise ValueError(f"softcap is {softcap}; it must be positive and finite.\n    {remedy}")
    return number


def check_sink_bias(sink_bias: object, shape: torch.Size, query: Tensor) -> Tensor | None:
    """Return the logit of each head, with all axes of the matrix; None for None.

    Raises:
        TypeError: it is not a floating tensor.
        ValueError: it has another shape, or is on another device.
    """
    if sink_bias is None:
        return None
    tensor = check_floating("sink_bias", sink_bias, "(num_heads,)")
    num_heads = shape[-3] if len(shape) > 2 else 1
    if tensor.shape not in ((), (num_heads,)):
        raise ValueError(
            f"sink_bias has shape {shape_text(tensor.shape)}; a matrix of shape "
            f"{shape_text(shape)} needs ({num_heads},), one logit for each head.\n"
            "    One number, a tensor without axes, stands for all heads."
        )
    one_a_head = tensor.reshape((-1, 1, 1)[-len(shape) :])
    return check_broadcast("sink_bias", one_a_head, shape, query.device)


def check_scores(scores: object) -> Tensor:
    """Return given scores, a floating tensor (..., q_len, kv_len)."""
    return check_tensor("scores", scores, "(..., num_heads, q_len, kv_len)")


def check_weights(weights: object) -> Tensor:
    """Return given weights: at least 0, and each row sums to 1 or is all 0.

    Weights on the meta device are not checked, for they have no numbers.

    Raises:
        TypeError: they are not a floating tensor.
        ValueError: a row breaks the rule; the message names the row with the least negative weight,
            or the row whose sum is furthest from 1.
    """
    tensor = check_tensor("weights", weights, "(..., num_heads, q_len, kv_len)")
    if tensor.is_meta:
        return tensor
    numbers, tolerance = tensor.detach(), _sum_tolerance(tensor)
    least, sums = numbers.amin(-1), numbers.sum(-1, dtype=torch.float64)
    error = (sums - 1).abs().masked_fill(sums == 0, 0).nan_to_num(nan=0)  # NaN is allowed
    if bool((least < 0).any()):
        wrong = least.nan_to_num(nan=0).argmin()
        came = f"the number {least.flatten()[wrong].item():.6g}"
    elif bool((error > tolerance).any()):
        wrong = error.argmax()
        came = f"the sum {sums.flatten()[wrong].item():.6g}"
    else:
        return tensor
    row = tuple(int(i) for i in torch.unravel_index(wrong, sums.shape))
    columns = numbers.sum(-2, dtype=torch.float64)
    remedy = "Divide each row by its sum, or pass what went into the softmax to from_scores."
    if bool(((columns - 1).abs() <= tolerance).all()):
        remedy = "Its columns sum to 1: the softmax ran over the queries. Pass weights.mT."
    raise ValueError(
        f"weights {shape_text(tensor.shape)} has row {row} with {came}; weights must be at least 0 "
        f"and each row must sum to 1 within {tolerance:.2g}, for {dtype_text(tensor.dtype)}, "
        f"or be all 0.\n    {remedy}"
    )


def _sum_tolerance(weights: Tensor) -> float:
    """Return how far the sum of a row of weights may be from 1.

    Rounding changes each weight, and so their sum, by at most eps / 2 of itself, and a subnormal
    weight by half of the smallest number. Three roundings are allowed: of the sum of a softmax, of
    its quotient, and of a mean over heads. The sum itself has the error of a random walk in the
    dtype of statistics. Longer decimals than 1e-6 are not required.
    """
    info, keys = torch.finfo(weights.dtype), weights.shape[-1]
    accumulated = torch.finfo(torch.promote_types(weights.dtype, torch.float32)).eps
    of_weights = 1.5 * info.eps + keys * info.tiny * info.eps / 2
    return of_weights + keys**0.5 * accumulated + 1e-6
