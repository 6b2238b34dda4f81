"""Conversion of calls of ``flex_attention`` to an AttentionMatrix.

A Tracer observes ``flex_attention`` as an operation if it runs uncompiled. Compiled, it is one
kernel that no PyTorch mode observes.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.masks import Mask, as_mask
from regard.masks.recognise import recognised
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.scores.box import Box
from regard.tracing.tracer import Operation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["FLEX_ATTENTION", "FlexCalls"]

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
_NAMES = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
# A mask with more elements stays a callable: recognising it would need all of its elements.
_LARGEST = 2**26


class FlexCalls:
    """A reader of ``flex_attention`` calls that converts a BlockMask shared by layers once."""

    def __init__(self) -> None:
        # A model has one BlockMask for each kind of layer, so the last few are enough.
        self._masks: deque[tuple[BlockMask, torch.Size, Mask | None]] = deque(maxlen=4)

    def matrix(self, operation: Operation) -> AttentionMatrix:
        """Return the attention matrix of a call."""
        given = dict(zip(_NAMES, operation.args, strict=False)) | operation.kwargs
        score_mod = _whole(given["score_mod"], given.get("score_mod_other_buffers", ()))
        return attend(
            given["query"],
            given["key"],
            mask=self._mask(
                _block_mask(given["block_mask"], given.get("mask_mod_other_buffers", ())),
                given["query"],
                given["key"],
            ),
            scale=float(given["scale"]),
            score_mod=None if _is_identity(given["score_mod"]) else score_mod,
        )

    @staticmethod
    def value(operation: Operation) -> Tensor:
        """Return the value tensor of a call."""
        return operation.args[_NAMES.index("value")]

    def _mask(self, block_mask: "BlockMask | None", query: Tensor, key: Tensor) -> Mask | None:
        """Return a BlockMask as a regard mask, of a named kind if it is small enough to check."""
        if block_mask is None:
            return None
        shape = torch.Size((*query.shape[:-1], key.shape[-2]))
        for known, of_shape, mask in self._masks:
            if known is block_mask and of_shape == shape:
                return mask
        mask = as_mask(block_mask).bind(shape, query.device)
        if shape[0] * shape[-2] * shape[-1] <= _LARGEST:
            leading = (slice(0, shape[0]), slice(0, shape[1]))
            everything = Box(leading, slice(0, shape[-2]), slice(0, shape[-1]))
            mask = recognised(mask.block(everything, shape, query.device), shape)
        self._masks.append((block_mask, shape, mask))
        return mask


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
