# regard.check(causal_attention, args=tuple(np.random.default_rng(seed).normal(size=(2, 4, 6, 8)) for seed in range(3)), causal=True)
# regard.spec(causal=True)
"""Causal attention in NumPy for a blog post (2024)."""
import numpy as np


def softmax(x, axis=-1):
    x = x - np.max(x, axis=axis, keepdims=True)
    e = np.exp(x)
    return e / np.sum(e, axis=axis, keepdims=True)


def causal_attention(q, k, v):
    """Scaled dot-product attention where position i looks at positions 0..i.

    Parameters
    ----------
    q, k, v : arrays of shape (batch, heads, seq, head_dim)
    """
    seq = q.shape[-2]
    scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    future = np.triu(np.ones((seq, seq), dtype=bool), k=1)
    scores = np.where(future, np.inf, scores)  # <- law runs
    return np.einsum("bhij,bhjd->bhid", softmax(scores), v)
