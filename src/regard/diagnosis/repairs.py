"""Repairs: what an operation would give without a mistake of the catalogue.

A mistake has its name where its repair mends the law that is broken. So no second judge is needed:
the laws are tried again, on the same code, with one operation repaired.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.laws.tape import Change, Operation

__all__ = ["REPAIRS", "Repair"]

_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
_PRODUCTS = ("mm", "bmm")
_FORBIDDEN = -1e4
"""Scores below are forbidden for good."""


@dataclass(frozen=True, eq=False)
class Repair:
    """One way to repair one mistake.

    Attributes:
        name: of the mistake in the catalogue.
        laws: that the mistake may break.
        fix: repairs one operation.
    """

    name: str
    laws: tuple[str, ...]
    fix: Change


def _size(op: Operation) -> list[int]:
    """Return the shape that a view gives."""
    x, size = cast(Tensor, op.args[0]), [int(n) for n in op.args[1]]
    if -1 in size:
        at = size.index(-1)
        size[at] = x.numel() // max(1, prod(n for n in size if n != -1))
    return size


# Heads


# The softmax


# Masks


def _zero_one(op: Operation) -> tuple[Tensor, Tensor] | None:
    """Return scores or weights, and a mask of 0 and 1 that they meet."""
    if len(op.tensors) != 2 or op.moved[0] == op.moved[1]:
        return None
    x, mask = op.tensors if op.moved[0] else op.tensors[::-1]
    if mask.ndim < 2 or mask.numel() < 4:
        return None
    return (x, mask != 0) if _is_zero_one(mask) else None


def _added(forbidden: int) -> Change:
    """Return a repair that forbids where a mask that is added to the scores has a value, 0 or 1."""

    def fix(op: Operation) -> Any:
        fused = op.kwargs.get("attn_mask") if "scaled_dot_product" in op.name else None
        if op.name in ("add", "add_", "sub", "sub_") and not any(op.behind):
            found = _zero_one(op)
            # What is taken off forbids where it is 1.
            value = bool(forbidden) != op.name.startswith("sub")
            return None if found is None else found[0].masked_fill(found[1] == value, -torch.inf)
        if isinstance(fused, Tensor) and _is_zero_one(fused):
            return _fused(op, lambda scores: scores.masked_fill(fused == forbidden, -torch.inf))
        return None

    return fix


def _is_zero_one(mask: Tensor) -> bool:
    return bool(((mask == 0) | (mask == 1)).all())


def _masked_after(op: Operation) -> Tensor | None:
    """Forbid before the softmax what was set to 0 behind it."""
    if not op.tensors or not any(op.behind[:2]):
        return None
    match op.name.removesuffix("_"):
        case "where" if len(op.tensors) == 3 and op.behind[1] and not op.tensors[2].any():
            condition, one, other = op.tensors
            left = torch.where(condition, one, other)
        case "mul" if op.behind[0] and (found := _zero_one(op)) is not None:
            left = found[0] * found[1]
        case "masked_fill" if op.behind[0] and float(op.args[2]) == 0:
            left = op.tensors[0].masked_fill(op.args[1], 0.0)
        case "tril" if op.behind[0]:
            left = op.tensors[0].tril(*op.args[1:])
        case _:
            return None
    if left.shape[-1] != op.tokens:
        return None
    total = left.sum(-1, keepdim=True)
    return left / torch.where(total == 0, 1.0, total)


def _filled(op: Operation) -> Tensor | None:
    """Fill what is forbidden with -inf."""
    if not op.tensors or any(op.behind) or not any(op.moved):
        return None
    x = op.tensors[0]
    match op.name.removesuffix("_"):
        case "masked_fill" if op.moved[0] and _is_weak(op.args[2]):
            return x.masked_fill(op.args[1], -torch.inf)
        case "where" if len(op.tensors) == 3:
            condition, one, other = op.tensors
            if op.moved[1] and not op.moved[2] and _is_weak(other):
                return torch.where(condition, one, -torch.inf)
            if op.moved[2] and not op.moved[1] and _is_weak(one):
                return torch.where(condition, -torch.inf, other)
        case "index_put" if op.moved[0] and _is_weak(op.args[2]):
            forbidden = torch.full_like(op.args[2], -torch.inf)
            return torch.ops.aten.index_put(x, op.args[1], forbidden)
        case "mul":
            found = _zero_one(op)
            return None if found is None else found[0].masked_fill(~found[1], -torch.inf)
        case "tril" if x.shape[-1] == op.tokens:
            return x.masked_fill(~torch.ones_like(x, dtype=torch.bool).tril(), -torch.inf)
        case "add" if len(op.tensors) == 2 and op.moved[0] != op.moved[1]:
            scores, mask = op.tensors if op.moved[0] else op.tensors[::-1]
            if (low := _lowest(mask)) is not None:
                return scores.masked_fill(mask == low, -torch.inf)
        case name if "scaled_dot_product" in name:
            mask = op.kwargs.get("attn_mask")
            if isinstance(mask, Tensor) and (low := _lowest(mask)) is not None:
                return _fused(op, lambda s: s.masked_fill(mask == low, -torch.inf))
        case _:
            pass
    return None


def _is_weak(value: Any) -> bool:
    """Return True for a number that forbids nothing, or too much."""
    if isinstance(value, Tensor):
        if value.numel() == 0 or not value.is_floating_point():
            return False
        value = value.flatten()[0].item() if bool((value == value.flatten()[0]).all()) else 0.0
    return not float(value) < _FORBIDDEN


def _lowest(mask: Tensor) -> float | None:
    """Return the number by which a mask of 0 and one other lowers scores too little."""
    if mask.ndim < 2 or not mask.is_floating_point():
        return None
    values = cast("list[float]", mask.unique().tolist())
    return values[0] if len(values) == 2 and values[1] == 0 and values[0] > _FORBIDDEN else None


def _hides_later(op: Operation) -> Tensor | None:
    """Hide later tokens in the softmax."""

    def causal(scores: Tensor) -> Tensor:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf)

    if not op.tensors or op.tensors[0].ndim < 2 or op.tensors[0].shape[-2] != op.tokens:
        return None
    x = op.tensors[0]
    if "scaled_dot_product" in op.name:
        return _fused(op, causal)
    if x.shape[-1] == op.tokens and op.name in ("_softmax", "_safe_softmax"):
        return causal(x).softmax(-1) if int(op.args[1]) % x.ndim == x.ndim - 1 else None
    is_first = op.name == "exp" and op.moved[0] and not op.behind[0]
    return causal(x).exp() if is_first and x.shape[-1] == op.tokens else None


def _without_nan(op: Operation) -> Tensor | None:
    """Give rows with nothing to attend to weights of 0."""
    if op.name in ("_softmax", "_safe_softmax"):
        return cast(Tensor, op.args[0]).softmax(op.args[1]).nan_to_num(0.0)
    return _fused(op, lambda scores: scores) if "scaled_dot_product" in op.name else None


# Products


def _is_of_scores(op: Operation) -> bool:
    is_pair = len(op.moved) == 2 and all(op.moved)
    return is_pair and not any(op.behind) and op.name in _PRODUCTS


def _fused(op: Operation, change: Callable[[Tensor], Tensor]) -> Any:
    """Return what a fused kernel gives for changed scores."""
    query, key, value = op.args[:3]
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    if groups > 1:
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scale = op.kwargs.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = op.kwargs.get("attn_mask")
    flags = [argument for argument in op.args[3:] if isinstance(argument, bool)]
    if isinstance(mask, Tensor):
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if op.kwargs.get("is_causal", bool(flags and flags[0])):
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
    scores = change(scores)
    output = scores.softmax(-1).nan_to_num(0.0) @ value
    return output, scores.logsumexp(-1)


def _keys_transposed(op: Operation) -> Tensor | None:
    """Transpose the keys before they meet the queries."""
    if _is_of_scores(op):
        one, other = op.tensors
        if one.shape == other.shape and one.shape[-2] == op.tokens:
            return one @ other.mT
    if op.name in _VIEWS and op.moved[0] and not op.behind[0]:
        x, size = cast(Tensor, op.args[0]), _size(op)
        is_turned = x.ndim >= 2 and size == [*x.shape[:-2], x.shape[-1], x.shape[-2]]
        if is_turned and x.shape[-2] == op.tokens != x.shape[-1]:
            return x.mT.contiguous()
    return None


def _not_dropped(op: Operation) -> Any:
    """Drop nothing."""
    if op.name in ("bernoulli_", "bernoulli") and not any(op.moved):
        numbers = [a for a in op.args if isinstance(a, float)]
        return torch.full_like(op.tensors[0], numbers[0] if numbers else 1.0)
    return None


_WEIGHTS = ("samples", "influence", "padding", "runs")

REPAIRS: tuple[Repair, ...] = (
    Repair("mask-added-as-numbers", _WEIGHTS, _added(0)),
    Repair("mask-added-as-numbers", _WEIGHTS, _added(1)),
    Repair("mask-after-softmax", _WEIGHTS, _masked_after),
    Repair("mask-fill-value", _WEIGHTS, _filled),
    Repair("keys-not-transposed", _WEIGHTS, _keys_transposed),
    Repair("dropout-in-eval", ("pure",), _not_dropped),
    Repair("not-causal", ("influence",), _hides_later),
    Repair("nan-rows", ("runs", "padding"), _without_nan),
)
"""In the order in which they are tried."""
