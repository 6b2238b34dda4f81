"""Conversion of calls of ``flex_attention`` to an AttentionMatrix.

A Tracer observes ``flex_attention`` as an operation if it runs uncompiled. Compiled, it is one
kernel that no PyTorch mode observes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.capture.fused_calls import Read
from regard.masks import Mask, as_mask
from regard.masks.recognise import recognised
from regard.matrix.attention_matrix import attend
from regard.scores.box import Box
from regard.tracing.tracer import Operation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["FLEX_ATTENTION", "read_flex"]

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
_NAMES = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
# A mask with more elements stays a callable: recognising it would need all of its elements.
_LARGEST = 2**26


def read_flex(operation: Operation) -> Read:
    """Return the attention matrix of a call of ``flex_attention``, and a function for its value."""
    given = dict(zip(_NAMES, operation.args, strict=False)) | operation.kwargs
    query, key = given["query"], given["key"]
    score_mod = _whole(given["score_mod"], given.get("score_mod_other_buffers", ()))
    block_mask = _block_mask(given["block_mask"], given.get("mask_mod_other_buffers", ()))
    matrix = attend(
        query,
        key,
        mask=None if block_mask is None else _mask(block_mask, query, key),
        scale=float(given["scale"]),
        score_mod=None if _is_identity(given["score_mod"]) else score_mod,
    )
    return matrix, lambda: given["value"]


def _mask(block_mask: "BlockMask", query: Tensor, key: Tensor) -> Mask | None:
    """Return a BlockMask as a regard mask, of a named kind if it is small enough to check."""
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    mask = as_mask(block_mask).bind(shape, query.device)
    if shape[0] * shape[-2] * shape[-1] > _LARGEST:
        return mask
    leading = (slice(0, shape[0]), slice(0, shape[1]))
    everything = Box(leading, slice(0, shape[-2]), slice(0, shape[-1]))
    return recognised(mask.block(everything, shape, query.device), shape)


def _block_mask(parts: tuple[Any, ...], buffers: tuple[Any, ...]) -> "BlockMask | None":
    """Rebuild the BlockMask from the operation's arguments; None for no mask."""
    from torch.nn.attention.flex_attention import (  # slow to import, and rarely needed
        _LARGE_SPARSE_BLOCK_SIZE,  # pyright: ignore[reportPrivateUsage]
        BlockMask,
    )

    q_len, kv_len, *blocks, block_height, block_width, mask_mod = parts
    if block_height == block_width == _LARGE_SPARSE_BLOCK_SIZE:
        return None
    return BlockMask.from_kv_blocks(
        *blocks[:4],
        BLOCK_SIZE=(block_height, block_width),
        mask_mod=_whole(mask_mod, buffers),
        seq_lengths=(q_len, kv_len),
    )


def _whole(function: Any, buffers: tuple[Any, ...]) -> Callable[..., Tensor]:
    """Bind the captured tensors of a traced callable, which takes them as extra arguments."""
    kept = [each.clone() if isinstance(each, Tensor) else each for each in buffers]
    return lambda *arguments: function(*arguments, *kept)


def _is_identity(function: Any) -> bool:
    """Return True if a traced score_mod returns its score unchanged."""
    if not isinstance(function, torch.fx.GraphModule):
        return False
    nodes = list(function.graph.nodes)
    return nodes[-1].args[0] is nodes[0]
