"""What the layers say when they are made or called wrongly, word for word."""

from collections.abc import Callable

import pytest
import torch

import regard
from regard.nn import (
    CrossAttention,
    LearnedPositions,
    RotaryPositions,
    SelfAttention,
    SinusoidalPositions,
    TransformerBlock,
)

ERRORS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "head_dim does not come out even",
        lambda: SelfAttention(10, 4),
        ValueError,
        "num_heads is 4 and embed_dim is 10; embed_dim must be a multiple of num_heads when "
        "head_dim is left out.\n"
        "    Use num_heads=2, or pass head_dim, which may have any value.",
    ),
    (
        "more heads than numbers",
        lambda: TransformerBlock(2, 3),
        ValueError,
        "num_heads is 3 and embed_dim is 2; embed_dim must be a multiple of num_heads when "
        "head_dim is left out.\n"
        "    Use num_heads=2, or pass head_dim, which may have any value.",
    ),
    (
        "groups of unequal size",
        lambda: CrossAttention(16, 8, num_kv_heads=3),
        ValueError,
        "num_kv_heads is 3 and num_heads is 8; num_heads must be a multiple of num_kv_heads "
        "(grouped-query attention).\n    Use num_kv_heads=2.",
    ),
    (
        "no heads",
        lambda: SelfAttention(8, 0),
        ValueError,
        "num_heads is 0; it must be at least 1.\n    Pass for example num_heads=1.",
    ),
    (
        "values of no width",
        lambda: SelfAttention(8, value_dim=0),
        ValueError,
        "value_dim is 0; it must be at least 1.\n    Pass for example value_dim=1.",
    ),
    (
        "half a head",
        lambda: SelfAttention(8, 0.5),
        TypeError,
        "num_heads is a float; it must be a whole number.\n"
        "    Pass an int, for example num_heads=1.",
    ),
    (
        "input of another width",
        lambda: SelfAttention(8)(torch.ones(2, 5, 7)),
        ValueError,
        "x has embed_dim 7; this layer was made for embed_dim 8.\n"
        "    x (2, 5, 7) was read as (..., tokens, embed_dim).",
    ),
    (
        "transposed input",
        lambda: SelfAttention(8).weights(torch.ones(2, 8, 7)),
        ValueError,
        "x has embed_dim 7; this layer was made for embed_dim 8.\n"
        "    x (2, 8, 7) looks transposed; pass x.mT.",
    ),
    (
        "one token without its axis",
        lambda: SelfAttention(8)(torch.ones(8)),
        ValueError,
        "x has shape (8,); it must have at least two axes, (..., tokens, embed_dim).\n"
        "    For one token use x[None, :].",
    ),
    (
        "token numbers for embeddings",
        lambda: SelfAttention(8)(torch.ones(5, 8, dtype=torch.long)),
        TypeError,
        "x is int64; attention needs a floating dtype.\n    Use x.float().",
    ),
    (
        "memory of another width",
        lambda: CrossAttention(8, memory_dim=6)(torch.ones(5, 8), torch.ones(4, 8)),
        ValueError,
        "memory has memory_dim 8; this layer was made for memory_dim 6.\n"
        "    memory (4, 8) was read as (..., tokens, memory_dim).",
    ),
    (
        "memory without a batch",
        lambda: CrossAttention(8)(torch.ones(2, 5, 8), torch.ones(4, 8)),
        ValueError,
        "memory has shape (4, 8) and x has (2, 5, 8); their batch axes must be equal.\n"
        "    For one memory for the whole batch use memory.expand(2, 4, 8).",
    ),
    (
        "numbers for a mask",
        lambda: SelfAttention(8, mask=torch.zeros(5, 5)),
        TypeError,
        "mask is a float32 tensor; a mask is a bool tensor (True = may attend), one of "
        "regard.masks, or a mask_mod or BlockMask of FlexAttention.\n"
        "    To add numbers to the scores, pass bias=. For nn.MultiheadAttention's convention "
        "(True = may not), use Drop(mask).",
    ),
    (
        "the class of a mask",
        lambda: SelfAttention(8)(torch.ones(5, 8), mask=regard.Causal),
        TypeError,
        "mask is the class Causal; it must be an instance.\n    Use Causal(...).",
    ),
    (
        "positions that are added",
        lambda: SelfAttention(8, 2, positions=SinusoidalPositions(8)),
        TypeError,
        "positions is a SinusoidalPositions; it must be a RotaryPositions.\n"
        "    Use RotaryPositions(4). Apply other positions to x before the layer.",
    ),
    (
        "rotary positions of another width",
        lambda: SelfAttention(8, 2, positions=RotaryPositions(8)),
        ValueError,
        "positions has head_dim 8 and the layer has 4; they must be equal.\n"
        "    Use RotaryPositions(4).",
    ),
    (
        "rotary positions of odd width",
        lambda: RotaryPositions(7),
        ValueError,
        "head_dim is 7; rotary positions turn pairs of numbers, so it must be even.\n"
        "    Use head_dim=8.",
    ),
    (
        "more tokens than learned positions",
        lambda: LearnedPositions(8, 10)(torch.ones(5, 8), offset=6),
        ValueError,
        "x has tokens at positions 6 to 10; this layer has positions 0 to 9.\n"
        "    Use a larger max_len, or SinusoidalPositions or RotaryPositions.",
    ),
    (
        "a learned position before the first",
        lambda: LearnedPositions(8, 10)(torch.ones(5, 8), offset=-2),
        ValueError,
        "x has tokens at positions -2 to 2; this layer has positions 0 to 9.\n"
        "    Use a larger max_len, or SinusoidalPositions or RotaryPositions.",
    ),
    (
        "half a position",
        lambda: RotaryPositions(4)(torch.ones(5, 4), offset=0.5),
        TypeError,
        "offset is a float; it must be a whole number.\n    Pass an int, for example offset=1.",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "text"), [pytest.param(*case[1:], id=case[0]) for case in ERRORS]
)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text
