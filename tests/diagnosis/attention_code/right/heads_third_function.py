# regard.check(attention)
# regard.spec(causal=False)
"""(batch, tokens, heads, dim), as flash attention has it."""
from math import sqrt

from torch import einsum


def attention(q, k, v):
    b, s, h, d = q.shape
    w = einsum("bqhd,bkhd->bhqk", q, k) / sqrt(d)
    return einsum("bhqk,bkhd->bqhd", w.softmax(-1), v)
