# regard.check(multi_head_attention, args=(np.random.default_rng(0).normal(size=(2, 6, 16)), PARAMS, 4), axes="batch tokens dim", causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""NumPy multi-head attention, weights as a dict (2023)."""
import numpy as np


def attention(q, k, v):
    """q, k, v: (batch, heads, tokens, dim)"""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores)  # <- law large
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights @ v


def multi_head_attention(x, params, n_heads):
    """x: (batch, tokens, dim); params: {"w_qkv": (dim, 3 dim), "w_out": (dim, dim)}"""
    b, t, d = x.shape
    qkv = (x @ params["w_qkv"]).reshape(b, t, 3, n_heads, d // n_heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    out = attention(q, k, v).transpose(0, 2, 1, 3).reshape(b, t, d)
    return out @ params["w_out"]


_rng = np.random.default_rng(0)
PARAMS = {"w_qkv": _rng.normal(size=(16, 48)) / 4, "w_out": _rng.normal(size=(16, 16)) / 4}
