# regard.check(attention, args=(np.random.randn(5, 8), np.random.randn(5, 8), np.random.randn(5, 8)))
# regard.spec(causal=False, heads=1)
"""Self-attention in plain NumPy, written for a seminar."""
import numpy as np


def softmax(z, axis):
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)


def attention(Q, K, V):
    """Q: (n, d), K: (m, d), V: (m, d).  Returns one row per query, (n, d)."""
    d = Q.shape[-1]
    S = Q @ K.T / np.sqrt(d)      # (n, m)
    A = softmax(S, axis=0)        # attention distribution  # <- softmax-wrong-axis
    return A @ V
