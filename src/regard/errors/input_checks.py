"""Checks of what a matrix is made of: query and key, scores, weights, biases."""

from math import inf, isfinite

import torch
from torch import Tensor

from regard.errors.formatting import dtype_text, kind_text, shape_text

__all__ = [
    "check_bias",
    "check_broadcast",
    "check_floating",
    "check_nothing_added",
    "check_query_key",
    "check_scale",
    "check_scores",
    "check_sink_bias",
    "check_softcap",
    "check_tensor",
    "check_weights",
]

_LAYOUT = "(..., num_heads, tokens, head_dim)"


def check_floating(name: str, value: object, axes: str) -> Tensor:
    """That value is a floating tensor.

    Raises:
        TypeError: value is no tensor, or not of a floating dtype.
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
    return value


def check_tensor(name: str, value: object, axes: str) -> Tensor:
    """That value is a floating tensor with at least two axes, none of them empty.

    Raises:
        TypeError: value is no tensor, or not of a floating dtype.
        ValueError: value has fewer than two axes, or an axis of length 0.
    """
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
            "    Leave out empty sequences before attending."
        )
    return value


def check_query_key(query: object, key: object) -> tuple[Tensor, Tensor]:
    """That a query and a key belong together: kinds, dtype, device, axes, heads.

    Raises:
        TypeError: not tensors, not floating, or of two dtypes.
        ValueError: shapes or devices that do not fit.
    """
    query = check_tensor("query", query, _LAYOUT)
    key = check_tensor("key", key, _LAYOUT)
    if query.dtype != key.dtype:
        raise TypeError(
            f"key is {dtype_text(key.dtype)} and query is {dtype_text(query.dtype)}; "
            "both must have one dtype.\n    Use key.to(query.dtype)."
        )
    if query.device != key.device:
        raise ValueError(
            f"key is on {key.device} and query is on {query.device}; "
            "both must be on one device.\n    Use key.to(query.device)."
        )
    if query.ndim != key.ndim:
        raise ValueError(
            f"key has {key.ndim} axes and query has {query.ndim}; both must have the same axes.\n"
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
    """The shapes, for an error: while torch.compile traces, reading one would fix it."""
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
    """The factor on query·key: 1/sqrt(head_dim) when None is given.

    Raises:
        TypeError: scale is no number.
        ValueError: scale is not finite.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(
            f"scale is {kind_text(scale)}; it must be a number.\n"
            "    Leave it out for 1/sqrt(head_dim); pass 1.0 for no scaling."
        )
    if not isfinite(scale):
        raise ValueError(
            f"scale is {scale}; it must be finite.\n    Leave it out for 1/sqrt(head_dim)."
        )
    return float(scale)


def check_broadcast(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """The tensor with the axes of shape, each equal or 1, on the device.

    Raises:
        ValueError: it does not broadcast, or is on another device.
    """
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and the query is on {device}; "
            f"both must be on one device.\n    Use {name}.to(query.device)."
        )
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
    """That bias, numbers added to the scores, is a floating tensor that broadcasts.

    Raises:
        TypeError: bias is no floating tensor.
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
    return check_broadcast("bias", bias, shape, query.device)


def check_softcap(softcap: object) -> float | None:
    """That softcap, the bound of the scores, is a positive number.

    Raises:
        TypeError: softcap is no number.
        ValueError: it is 0, negative or not finite.
    """
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(
            f"softcap is {kind_text(softcap)}; it must be a number.\n"
            "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0."
        )
    if not 0 < softcap < inf:
        raise ValueError(
            f"softcap is {softcap}; it must be positive and finite.\n"
            "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0."
        )
    return float(softcap)


def check_sink_bias(sink_bias: object, shape: torch.Size, query: Tensor) -> Tensor | None:
    """That sink_bias is one logit for each head, or one for all; with the axes of the matrix.

    Raises:
        TypeError: sink_bias is no floating tensor.
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
    """That given scores are a floating tensor of shape (..., q_len, kv_len)."""
    return check_tensor("scores", scores, "(..., num_heads, q_len, kv_len)")


def check_weights(weights: object) -> Tensor:
    """That given weights are a softmax: nothing below 0, every row sums to 1 or is all 0.

    Raises:
        ValueError: a row does neither; the first such row and its sum are named.
    """
    tensor = check_tensor("weights", weights, "(..., num_heads, q_len, kv_len)")
    if tensor.is_meta:
        return tensor
    sums = tensor.detach().sum(-1, dtype=torch.float64)
    tolerance = 8 * torch.finfo(tensor.dtype).eps + 1e-6
    wrong = ((sums - 1).abs() > tolerance) & (sums != 0)
    wrong |= tensor.detach().amin(-1) < 0
    if not wrong.any():
        return tensor
    first = tuple(int(i) for i in wrong.nonzero()[0])
    columns = tensor.detach().sum(-2, dtype=torch.float64)
    remedy = "Divide each row by its sum, or pass what went into the softmax to from_scores."
    if bool(((columns - 1).abs() <= tolerance).all()):
        remedy = "Its columns sum to 1: the softmax ran over the queries. Pass weights.mT."
    least = float(tensor.detach()[first].min())
    came = f"the number {least:.6g}" if least < 0 else f"the sum {float(sums[first]):.6g}"
    raise ValueError(
        f"weights has row {first} with {came}; "
        f"weights must be at least 0 and each row must sum to 1 (or be all 0).\n    {remedy}"
    )


def check_nothing_added(mask: object, bias: object) -> None:
    """That weights, which are a softmax already, come without what goes in before it.

    Raises:
        TypeError: there is a mask or a bias.
    """
    if mask is not None or bias is not None:
        name, remedy = ("bias", " + bias)") if mask is None else ("mask", ", mask=mask)")
        raise TypeError(
            f"from_weights() has a {name}; weights are after the softmax and take none.\n"
            f"    For a second softmax use from_scores(weights.log(){remedy}."
        )
