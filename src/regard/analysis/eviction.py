"""Eviction scores of cached keys as kvpress computes them, without the whole matrix.

The scores are those of kvpress 0.5, which is not imported. A key with a low score is evicted first.
"""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import RegardError, check_count
from regard.recording.layers import Layer, able_to_answer
from regard.recording.recording import Recording
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.reductions.sums import Sum
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import MASKED_SCORE


def to_kvpress(
    seen: Recording,
    window: int | None = None,
    *,
    kernel_size: int = 5,
    num_kv_heads: int | None = None,
) -> dict[str, Tensor]:
    """Return the score of each key of a KV cache, as the presses of kvpress compute it.

    Without a window, the score is the mean attention that a key receives from all queries that can
    attend to it and from all heads that share the key (``ObservedAttentionPress``, after H2O).
    With a window, it is the mean over the last queries only, smoothed along the keys
    (``SnapKVPress``); the keys of the window itself score above all others.

    Args:
        seen: the recording.
        window: the number of last queries to use; None uses all.
        kernel_size: the number of keys that SnapKV smooths over; odd.
        num_kv_heads: the number of key heads of the model. The default is the number of recorded
            key heads, which some models repeat.

    Returns:
        For each layer (batch, num_kv_heads, kv_len); the key with the lowest score is evicted
        first.

    Raises:
        ValueError: the window is longer than the text, or its queries were not recorded; the
            kernel is even; num_kv_heads does not divide num_heads, or is unknown.
        RegardError: neither query and key nor ``Sum(-2)`` was recorded.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 4, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)})
        >>> regard.exports.to_kvpress(seen, num_kv_heads=1)["layer"].shape
        torch.Size([1, 1, 4])

    Source:
        Zhang et al. 2023, "H2O", section 4; Li et al. 2024, "SnapKV", section 4.
    """
    layers = seen.layers
    if window is not None:
        check_count("window", window)
    if check_count("kernel_size", kernel_size) % 2 == 0:
        raise ValueError(
            f"kernel_size is {kernel_size}; it must be odd, so that a key lies in the middle.\n"
            "    SnapKV takes 5."
        )
    answers: dict[str, Tensor] = {}
    for layer in able_to_answer(layers, [Sum(-2)]):
        groups = _num_kv_heads(layer, num_kv_heads)
        if window is None:
            per_head = _received_by_observers(layer)
        else:
            per_head = _received_in_window(layer, window, kernel_size)
        per_head = per_head.reshape(-1, *layer.shape[-3:-2], per_head.shape[-1])
        answers[layer.name] = _grouped(per_head, groups, layer.shape[-1])
    return answers


def _grouped(per_head: Tensor, num_kv_heads: int, kv_len: int) -> Tensor:
    """Return the mean over the heads that share a key head, (batch, num_kv_heads, kv_len).

    Keys in a window have no score. They are never evicted, so their score is set above all others.
    """
    batch = per_head.shape[0]
    scores = per_head.reshape(batch, num_kv_heads, -1, per_head.shape[-1]).mean(2)
    missing = kv_len - scores.shape[-1]
    return F.pad(scores, (0, missing), value=scores.max().item() + 1) if missing else scores


def _received_by_observers(layer: Layer) -> Tensor:
    """Return the mean weight that each key receives from the queries that can attend to it."""
    if layer.matrix is None:
        return layer.reduce(Sum(-2)) / _causal_observers(layer).clamp(min=1)
    received, observers = layer.reduce(Sum(-2), _Observers())
    return received / observers.clamp(min=1)


def _causal_observers(layer: Layer) -> Tensor:
    """Return the number of rows at each key or after it, (kv_len,)."""
    if not layer.reads_itself:
        raise RegardError(
            f"layer {layer.name!r} has answers only, and as many keys as queries did not run; "
            "which queries can see a key is not known.\n"
            '    Observe the model again with keep="qk".'
        )
    rows, keys = layer.positions, torch.arange(layer.shape[-1], device="cpu")
    return (rows.stop - keys.clamp(min=rows.start)).clamp(min=0)


@final
@dataclass(frozen=True)
class _Observers(Reduction):
    """The number of queries that can attend to each key, (..., num_heads, kv_len).

    A score far below the maximum of its row counts as masked, also one from a given weight of 0. A
    row with only such scores attends to all its keys equally, and counts for each of them.
    """

    thread_safe = True

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros((*shape[:-2], shape[-1]), dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        seen = block.shifted.detach() > MASKED_SCORE
        return (Contribution(block.box.at_columns, seen.sum(-2).to(block.maximum.dtype)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


def _received_in_window(layer: Layer, window: int, kernel_size: int) -> Tensor:
    """Return the mean weight from the last queries to the keys before them, smoothed."""
    q_len, kv_len = layer.shape[-2:]
    if window >= kv_len or window > q_len:
        raise ValueError(
            f"window is {window} and layer {layer.name!r} has q_len = {q_len} and kv_len = "
            f"{kv_len}; there must be so many queries, and keys before them.\n"
            f"    Use window={max(1, min(q_len, kv_len - 1))} or less."
        )
    rows = layer.positions
    if layer.queries is not None and rows.stop != layer.queries.ran:
        raise ValueError(
            f"window is {window} and layer {layer.name!r} has the queries {rows.start} to "
            f"{rows.stop - 1}; the last that ran, {layer.queries.ran - 1}, must be among them.\n"
            f"    Observe the model again with queries=slice(-{window}, None)."
        )
    keys = [(key, key + 1) for key in range(kv_len - window)]
    received = layer.whole().segments([(q_len - window, q_len)], keys)[..., 0, :]
    flat = received.reshape(-1, 1, received.shape[-1])
    smooth = F.avg_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2)
    return smooth.reshape(received.shape)


def _num_kv_heads(layer: Layer, argument: int | None) -> int:
    """Return the number of key heads of a layer: the given number, or that of its key."""
    num_heads = layer.shape[-3] if len(layer.shape) > 2 else 1
    if argument is None:
        source = None if layer.matrix is None else layer.whole().source
        if isinstance(source, QueryKeyScores):
            return source.key.shape[-3] if source.key.ndim > 2 else 1
        if layer.matrix is None and num_heads > 1:
            raise ValueError(
                f"num_kv_heads is None; it must be given where layer {layer.name!r} has answers "
                "only.\n    It is num_key_value_heads in a model's config."
            )
        return num_heads
    if num_heads % check_count("num_kv_heads", argument):
        raise ValueError(
            f"num_kv_heads is {argument} and layer {layer.name!r} has {num_heads} heads; num_heads "
            "must be a multiple of it.\n    It is num_key_value_heads in a model's config."
        )
    return argument
