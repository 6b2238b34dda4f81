# regard.check(multi_head_attention, args=(np.random.default_rng(0).normal(size=(2,5,12)), *(np.random.default_rng(i).normal(size=(12,12))*.3 for i in range(1,5)), 3))
# regard.spec(causal=False, heads=3, positions=None)
import numpy as np


def multi_head_attention(x, w_q, w_k, w_v, w_o, n_heads):
    batch, seq, dim = x.shape
    d = dim // n_heads

    def heads(w):
        return (x @ w).reshape(batch, seq, n_heads, d).transpose(0, 2, 1, 3)

    q, k, v = heads(w_q), heads(w_k), heads(w_v)
    logits = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(d)
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("bhij,bhjd->bihd", p, v)
    return y.reshape(batch, seq, dim) @ w_o
