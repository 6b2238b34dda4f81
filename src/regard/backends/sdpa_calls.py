"""Calls of PyTorch's fused attention, each on one box of the matrix."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.autograd_limits import first_only, only_backward
from regard.backends.backend import Between, nothing
from regard.backends.recomputed import recomputed
from regard.masks import Mask
from regard.scores.autocast import without_autocast
from regard.scores.box import Box, Index, broadcast_index
from regard.scores.grouped_heads import kv_leading
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import accumulation_dtype


class Call(NamedTuple):
    """One call of the kernel.

    Attributes:
        box: complete rows of all heads of some batch entries, and the columns that they see.
        hides: what is masked inside the box: "nothing"; "future", row i of the box sees its first
            i + 1 columns; or "some", which the mask says.
    """

    box: Box
    hides: Literal["nothing", "future", "some"]


class Parts(NamedTuple):
    """Query, key and value, or an index for each of them."""

    query: Any
    key: Any
    value: Any


class Product(NamedTuple):
    """weights @ value.

    Attributes:
        source: query and key; its scores are scale · query·key + bias.
        mask: which keys a query may attend to; None: all.
        value: (..., num_kv_heads, kv_len, value_dim), with the leading axes of the key.
    """

    source: QueryKeyScores
    mask: Mask | None
    value: Tensor

    @property
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""
        return self.source.shape

    @property
    def tensors(self) -> Parts:
        """The whole query, key and value."""
        return Parts(self.source.query, self.source.key, self.value)

    def places(self, box: Box) -> Parts:
        """Return the positions of a box in query, key and value."""
        of_keys = (*kv_leading(box.leading, self.source.group), box.columns)
        return Parts(box.at_rows, of_keys, of_keys)

    def rows(self, call: Call) -> Tensor:
        """Compute the rows of one call, (..., rows, value_dim)."""
        return self.attend(call, Parts(*map(_part, self.tensors, self.places(call.box))))

    def attend(self, call: Call, parts: Parts) -> Tensor:
        """Compute the rows of one call, (..., rows, value_dim), from its query, key and value."""
        scale, extra = self.source.scale, self.extra(call)
        return fused_attention(parts, scale, extra, causal=call.hides == "future")

    def extra(self, call: Call) -> Tensor | None:
        """Return the attn_mask of the kernel: bools, or numbers added to the scores."""
        bias, allowed = self.source.bias, None
        if call.hides == "some":
            assert self.mask is not None
            allowed = self.mask.block(call.box, self.shape, self.source.device)
        if bias is None:
            return allowed
        bias = broadcast_index(bias, call.box.at_both).to(self.source.dtype)
        return bias if allowed is None else torch.where(allowed, bias, -torch.inf)


def in_one_call(product: Product) -> Tensor:
    """Compute weights @ value without a mask."""
    bias = product.source.bias
    bias = None if bias is None else bias.to(product.source.dtype)
    return fused_attention(product.tensors, product.source.scale, bias)


def in_calls(product: Product, calls: Sequence[Call], between: Between = nothing) -> Tensor:
    """Compute weights @ value, (..., q_len, value_dim), by calls that cover every row once."""
    between(0, len(calls))
    if len(calls) == 1:
        output = product.rows(calls[0])
        between(1, 1)
        return output

    def run() -> list[Tensor]:
        output = product.value.new_empty((*product.shape[:-1], product.value.shape[-1]))
        for done, call in enumerate(calls, 1):
            output[call.box.at_rows] = product.rows(call)
            between(done, len(calls))
        return [output]

    def pull_back(
        product: Product, _: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        (arriving,) = gradients
        return [None] * 3 if arriving is None else _pull_back(calls, product, arriving)

    (output,) = recomputed(run, pull_back, product, product.tensors)
    return output


def _part(tensor: Tensor, index: Index) -> Tensor:
    """Return tensor[index]; the tensor itself if the index covers all of it."""
    pairs = zip(index, tensor.shape, strict=False)
    return tensor if all(item == slice(0, n) for item, n in pairs) else tensor[index]


def _pull_back(calls: Sequence[Call], product: Product, arriving: Tensor) -> list[Tensor | None]:
    """Return the gradients of query, key and value; each call is repeated, so no mask is stored."""
    tensors = product.tensors
    needed = [index for index in range(3) if tensors[index].requires_grad]
    dtype = accumulation_dtype(product.source.dtype)
    totals = {index: torch.zeros_like(tensors[index], dtype=dtype) for index in needed}
    for call in calls:
        places = product.places(call.box)
        leaves = Parts(*(_part(t.detach(), at) for t, at in zip(tensors, places, strict=True)))
        inputs = [leaves[index].requires_grad_() for index in needed]
        with torch.enable_grad():
            output = product.attend(call, leaves)
        gradients = torch.autograd.grad(output, inputs, arriving[call.box.at_rows])
        for index, gradient in zip(needed, gradients, strict=True):
            totals[index][places[index]] += gradient
    return [totals.get(index) for index in range(3)]


def fused_attention(
    parts: Parts, scale: float, extra: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Call ``scaled_dot_product_attention`` for any leading axes and any value width.

    Args:
        parts: query (..., num_heads, rows, head_dim), key and value (..., num_kv_heads, columns,
            their width).
        scale: multiplies query·key.
        extra: bools (True = may attend) or numbers to add; broadcasts to (..., rows, columns).
        causal: if True, row i attends to the first i + 1 columns only.
    """
    leading, value_dim = parts.query.shape[:-1], parts.value.shape[-1]
    query, key, value = map(_four_axes, widened(parts))
    with without_autocast(query.device):
        try:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if extra is None else _mask_axes(extra, leading),
                is_causal=causal,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        except NotImplementedError as error:
            if "forward AD" in str(error):
                only_backward()
            raise
    if not torch.compiler.is_compiling() and output.grad_fn is not None:
        output.grad_fn.register_hook(_once)
    output = output.reshape(*leading, output.shape[-1])
    return output if output.shape[-1] == value_dim else output[..., :value_dim]


def _once(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> Any:
    """Let a second derivative of a fused kernel raise regard's error instead of PyTorch's."""
    if torch.is_grad_enabled():
        gradients = tuple(g if g is None else first_only(g, ()) for g in gradients)
    return gradients


def widened(parts: Parts) -> Parts:
    """Pad query, key and value with zeros to one width, as the kernel requires."""
    if parts.query.shape[-1] == parts.value.shape[-1]:
        return parts
    width = max(parts.query.shape[-1], parts.value.shape[-1])
    missing = [width - tensor.shape[-1] for tensor in parts]
    return Parts(*(F.pad(tensor, (0, n)) for tensor, n in zip(parts, missing, strict=True)))


def _four_axes(tensor: Tensor) -> Tensor:
    """Return the tensor as (batch, heads, tokens, dim), with a contiguous last axis.

    The kernel falls back to forming the matrix for other strides.
    """
    if tensor.ndim < 4:
        tensor = tensor[(None,) * (4 - tensor.ndim)]
    elif tensor.ndim > 4:
        tensor = tensor.flatten(0, -4)
    beside = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor if beside else tensor.contiguous()


def _mask_axes(extra: Tensor, leading: torch.Size) -> Tensor:
    """Return a mask with four axes; mixed full and length-1 batch axes become full."""
    batch = leading[:-2]
    if extra.ndim > 4 and extra.shape[:-3] != (1,) * len(batch):
        extra = extra.expand(*batch, *extra.shape[-3:])
    return _four_axes(extra)
