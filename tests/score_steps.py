"""What cases do to scores beside the scale: each step as regard has it, and by the oracle."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import oracle
import regard

BiasOf = Callable[[Tensor], regard.Bias]
NumbersOf = Callable[[Tensor, torch.Size], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# How each position bias is written with regard, and its numbers by the oracle.
POSITIONS: dict[str, tuple[BiasOf, NumbersOf]] = {
    "alibi": (regard.ALiBi, lambda slopes, s: oracle.alibi(slopes, *s[-2:])),
    "t5": (
        lambda table: regard.T5Bias(table, max_distance=11),
        lambda table, s: oracle.t5_bias(table, *s[-2:], bidirectional=True, max_distance=11),
    ),
    "t5-decoder": (
        lambda table: regard.T5Bias(table, bidirectional=False, max_distance=11),
        lambda table, s: oracle.t5_bias(table, *s[-2:], bidirectional=False, max_distance=11),
    ),
}


# Of the numbers that gradients flow to, but for num_heads.
POSITION_SHAPES = {"alibi": (), "t5": (8,), "t5-decoder": (6,)}


def _every_index(scores: Tensor) -> tuple[Tensor, ...]:
    """b, h, q_idx and kv_idx of every score of a matrix with one batch axis."""
    return torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")


def _by_index(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 0.1 * b - 0.2 * h + 0.01 * (q_idx - 2 * kv_idx)


@cache
def _table(shape: torch.Size) -> Tensor:
    """A number for each score of a sequence."""
    return torch.randn(shape[1:], generator=torch.Generator().manual_seed(5))


def _looked_up(shape: torch.Size) -> ScoreMod:
    table = _table(shape)
    return lambda score, _, h, q_idx, kv_idx: torch.tanh(score) * table[h][q_idx, kv_idx]


# FlexAttention's way, for one score of this matrix; and the same for all scores at once.
SCORE_MODS: dict[str, tuple[Callable[[torch.Size], ScoreMod], Callable[[Tensor], Tensor]]] = {
    "by-index": (lambda _: _by_index, lambda scores: _by_index(scores, *_every_index(scores))),
    "table": (
        _looked_up,
        lambda scores: torch.tanh(scores) * _table(scores.shape).to(scores.dtype),
    ),
}
