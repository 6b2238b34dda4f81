# regard.check(causal_attention, args=(np.random.randn(2, 6, 4), np.random.randn(2, 6, 4), np.random.randn(2, 6, 4)))
# regard.spec(causal=True)
"""attention, numpy only (no autograd). for the blog post"""
import numpy as np


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """
    q, k, v : arrays (n_head, n_seq, d_head)
    returns : array (n_seq, n_head * d_head), heads side by side
    """
    n_head, n_seq, d_head = q.shape
    logits = np.einsum("hid,hjd->hij", q, k) / np.sqrt(d_head)
    i, j = np.ogrid[:n_seq, :n_seq]
    logits = np.where(j <= i, logits, -np.inf)
    logits = logits - np.max(logits, axis=2, keepdims=True)
    p = np.exp(logits)
    p = p / np.sum(p, axis=2, keepdims=True)
    return np.einsum("hij,hjd->ihd", p, v).reshape(n_seq, n_head * d_head)
