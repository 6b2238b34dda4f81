"""weights @ value by PyTorch's fused attention."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, cast, final

import torch
from torch import Tensor

from regard.backends.autograd_limits import refuse_vmap
from regard.backends.backend import Backend, Between, nothing
from regard.backends.sdpa_calls import Product, in_one_call
from regard.backends.sdpa_tiling import form_of
from regard.backends.sweep import Sweep
from regard.masks import Mask
from regard.reductions.products import Output
from regard.reductions.reduction import Reduction
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

_FURTHEST = 2**12  # a logsumexp of this size has an error of 2^-12, like scores of this size


@final
class Sdpa(Backend):
    """``scaled_dot_product_attention`` on the parts of the matrix that a mask leaves visible.

    In some cases its kernels form the matrix or are not exact; ``refusal`` names these cases. If
    the answer is not finite, the sweep computes it again, because in a kernel NaN in a value
    reaches rows that mask its key.
    """

    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        others = [type(r).__name__ for r in reductions if type(r) is not Output]
        if others:
            return f"no fused kernel gives {', '.join(others)}"
        if len(reductions) > 1:
            return "a fused kernel gives one Output at a time"
        if not isinstance(source, QueryKeyScores):
            return "fused kernels start from query and key, not from scores"
        return (
            _scores_refusal(source)
            or _value_refusal(source, reductions[0])
            or _finite_refusal(source)
            or _gradient_refusal(source, mask, reductions[0])
        )

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        product = _product(source, mask, reductions)
        form = form_of(product)
        answer = product.shape[:-1].numel() * product.value.shape[-1] * source.dtype.itemsize
        parts = 0 if form.fold is None else answer  # the answer in parts, before they are joined
        return form.how, answer + parts + form.mask_bytes(product)

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        product = _product(source, mask, reductions)
        # Without a mask there is nothing to plan, and planning takes longer than a small product.
        if mask is None:
            between(0, 1)
            output = in_one_call(product)
            between(1, 1)
        else:
            output = form_of(product).attend(product, between)
        if _may_leak(product) and not isfinite(_sum(output)):
            return Sweep().reduce(source, mask, reductions, between)
        (value,) = reductions[0].tensors
        return (output.squeeze(-1) if value.ndim == 1 else output,)


def _product(source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> Product:
    (reduction,) = reductions
    if not isinstance(source, QueryKeyScores) or type(reduction) is not Output:
        raise ValueError("the fused backend computes weights @ value of query and key only")
    value, key = reduction.value, source.key
    reduction.check(source.shape, key.device)
    leading = key.shape[:-2]
    if value.ndim == 1:
        value = value[:, None]
    if value.shape[:-2] != leading:
        value = value.expand(*leading, *value.shape[-2:])
    return Product(source, mask, value)


def _may_leak(product: Product) -> bool:
    """Return True if NaN in the value may reach rows that mask its key, and checking is cheap.

    A kernel multiplies a masked value by a weight of 0, and 0 times NaN is NaN.
    """
    masks = product.mask is not None or product.source.bias is not None
    return masks and _can_read(product.source)


def _can_read(source: QueryKeyScores) -> bool:
    """Return True if reading a number neither synchronises the device nor breaks a graph."""
    return source.query.device.type == "cpu" and not torch.compiler.is_compiling()


def _scores_refusal(source: QueryKeyScores) -> str | None:
    """Return why no kernel can compute these scores, as a clause, or None."""
    if not source.plain:
        return "no fused kernel has softcap, score_mod, sink_bias or a bias by position"
    if source.bias is None:
        return None
    if source.bias.requires_grad:
        return "fused kernels form the matrix for the gradient of a bias"
    if torch.promote_types(source.bias.dtype, source.dtype) != source.dtype:
        return "fused kernels round a bias to the dtype of the query"
    return None


def _value_refusal(source: QueryKeyScores, reduction: Reduction) -> str | None:
    """Return why no kernel can multiply this value, as a clause, or None."""
    (value,) = reduction.tensors
    if value.dtype != source.key.dtype:
        return "fused kernels need one dtype for query, key and value"
    leading = source.key.shape[:-2]
    ours = value.shape[:-2]
    pairs = zip(ours[::-1], leading[::-1], strict=False)
    if len(ours) > len(leading) or any(n not in (1, full) for n, full in pairs):
        return "fused kernels need a value with the heads of the key"
    return None


def _finite_refusal(source: QueryKeyScores) -> str | None:
    """Return a clause if query, key or bias has NaN or infinity, otherwise None.

    The CPU kernel returns 0 for some rows with NaN, and lets NaN of masked keys reach other rows.
    One sum over each tensor detects them; a sum that overflows counts as infinity. Other devices
    and graphs of torch.compile are not checked, because that would synchronise the device or break
    the graph.
    """
    if not _can_read(source):
        return None
    try:
        total = _sum(source.query) + _sum(source.key)
        if source.bias is not None:
            total += 0 * source.bias.amax().clamp(min=0).item()  # -inf masks; NaN and inf do not
    except RuntimeError:
        refuse_vmap(source.tensors)
        raise
    return None if isfinite(total) else "query, key or bias holds NaN or infinity"


def _gradient_refusal(
    source: QueryKeyScores, mask: Mask | None, reduction: Reduction
) -> str | None:
    """Return a clause if the backward pass of the kernel would be inexact, otherwise None.

    The kernel recomputes weights as exp(score - logsumexp). If all scores of a row are far from 0,
    a float32 logsumexp rounds away the log of the sum, and n equal weights become 1 instead of 1/n.
    """
    tensors = (source.query, source.key, *reduction.tensors)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not wanted or not _can_read(source):
        return None
    furthest = abs(source.scale) * _longest(source.query) * _longest(source.key)
    if source.bias is not None:
        bias = source.bias.detach()
        # Without a mask only the largest bias of each row counts. With a mask every bias counts,
        # because the mask may hide the key with the largest one.
        bias = bias.amax(-1) if mask is None else bias
        furthest += bias.masked_fill(bias == -torch.inf, 0).abs().amax().item()
    if furthest <= _FURTHEST:
        return None
    return "the backward pass of fused kernels is inexact if all scores of a row are far from 0"


def _longest(tensor: Tensor) -> float:
    """Return the largest norm of the tokens' vectors."""
    return float(cast(Tensor, tensor.detach().norm(dim=-1)).amax())


def _sum(tensor: Tensor) -> float:
    return tensor.sum(dtype=torch.float32).item()
