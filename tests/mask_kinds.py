"""How each kind of mask is written with regard, and which keys it allows by the oracle."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import oracle
import regard
from regard.masks.mask import MaskLike, PointMask

MaskOf = Callable[[torch.Size], "MaskLike | None"]
AllowedOf = Callable[[torch.Size], Tensor | None]


def _lengths(shape: torch.Size) -> list[int]:
    """The first sequence is whole, the second empty, the third holds one key, and so on."""
    count = shape[0] if len(shape) > 2 else 1
    return [(shape[-1], 0, 1, shape[-1] - 1)[i % 4] for i in range(count)]


def _padding(shape: torch.Size) -> regard.Mask:
    lengths = _lengths(shape)
    return regard.Padding(lengths if len(shape) > 2 else lengths[0])


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


def _keys(shape: torch.Size) -> Tensor:
    return _random(shape[-1])


def _pairs(shape: torch.Size) -> Tensor:
    """Every pair of its own; the first query may attend to nothing."""
    return _random(*shape) & (torch.arange(shape[-2]) > 0)[:, None]


def _documents(shape: torch.Size) -> list[list[int]] | list[int]:
    """Documents of three keys, each sequence one key further, and the last two exchanged."""
    kv_len = shape[-1]
    rows = [[(key + i) // 3 for key in range(kv_len)] for i in range(shape[0])]
    return [row[:-2] + row[-2:][::-1] for row in rows] if len(shape) > 2 else rows[0]


def _scattered(shape: torch.Size) -> list[int]:
    """Documents in pieces, and of numbers in no order."""
    return [(7 - key * key) % 3 for key in range(shape[-1])]


def _point_mask(shape: torch.Size) -> PointMask:
    """Another band for every matrix of the batch and every head, and no key of index 2."""
    allowed = torch.arange(shape[-1]) != 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((q_idx + h - kv_idx).abs() <= 1 + b) & allowed[kv_idx]

    return mask_mod


def _points(shape: torch.Size) -> Tensor:
    """The same for all indices at once."""
    return oracle.pointwise(_point_mask(shape), shape)


def _block_mask(shape: torch.Size) -> BlockMask:
    batch, num_heads = shape[:-3].numel(), shape[-3:-2].numel()
    return create_block_mask(
        _point_mask(shape), batch, num_heads, *shape[-2:], device="cpu", BLOCK_SIZE=4
    )


MASKS: dict[str, tuple[MaskOf, AllowedOf]] = {
    "none": (lambda _: None, lambda _: None),
    "causal": (lambda _: regard.Causal(), lambda s: oracle.causal(*s[-2:])),
    "causal-top-left": (
        lambda _: regard.Causal(align="top-left"),
        lambda s: oracle.causal_top_left(*s[-2:]),
    ),
    "window-left": (
        lambda _: regard.SlidingWindow(2, 0),
        lambda s: oracle.window(*s[-2:], 2, 0),
    ),
    "window-both": (
        lambda _: regard.SlidingWindow(1, 3),
        lambda s: oracle.window(*s[-2:], 1, 3),
    ),
    "window-right": (
        lambda _: regard.SlidingWindow(0, 2),
        lambda s: oracle.window(*s[-2:], 0, 2),
    ),
    "padding": (_padding, lambda s: oracle.padding(_lengths(s), s)),
    "bool-keys": (_keys, _keys),
    "keep-pairs": (lambda s: regard.Keep(_pairs(s)), _pairs),
    "drop-pairs": (lambda s: regard.Drop(~_pairs(s)), _pairs),
    "keep-nothing": (
        lambda _: torch.zeros(1, dtype=torch.bool),
        lambda s: torch.zeros(s[-2:], dtype=torch.bool),
    ),
    "causal-and-padding": (
        lambda s: regard.Causal() & _padding(s),
        lambda s: oracle.causal(*s[-2:]) & oracle.padding(_lengths(s), s),
    ),
    "tensor-and-window-and-causal": (
        lambda s: _keys(s) & (regard.SlidingWindow(3, 1) & regard.Causal()),
        lambda s: _keys(s) & oracle.window(*s[-2:], 3, 1) & oracle.causal(*s[-2:]),
    ),
    "prefix": (
        lambda s: regard.PrefixLM(_lengths(s) if len(s) > 2 else _lengths(s)[0]),
        lambda s: oracle.causal(*s[-2:]) | oracle.padding(_lengths(s), s),
    ),
    "documents": (
        lambda s: regard.Documents(_documents(s)),
        lambda s: oracle.documents(_documents(s), s),
    ),
    "scattered-documents": (
        lambda s: regard.Documents(_scattered(s)),
        lambda s: oracle.documents(_scattered(s), s),
    ),
    "either": (
        lambda s: regard.SlidingWindow(1, 0) | _keys(s),
        lambda s: oracle.window(*s[-2:], 1, 0) | _keys(s),
    ),
    "not": (
        lambda s: ~(regard.Causal() | ~_padding(s)),
        lambda s: ~oracle.causal(*s[-2:]) & oracle.padding(_lengths(s), s),
    ),
    "rows": (
        lambda s: regard.masks.RowSlice(regard.Causal(), 1, s[-2] + 3),
        lambda s: oracle.causal(s[-2] + 3, s[-1])[1:-2],
    ),
    "mask-mod": (_point_mask, _points),
    "block-mask": (_block_mask, _points),
}
# The cases of a square matrix cost as much again: these kinds show what can go wrong there.
SQUARE_TOO = set(MASKS) - {"scattered-documents", "either", "not", "rows", "mask-mod", "block-mask"}
