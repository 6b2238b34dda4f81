# regard.check(flash_attention, args=tuple(np.random.default_rng(0).normal(size=size) for size in [(6, 8), (9, 8), (9, 8)]), axes="tokens dim")
# regard.spec(causal=False, heads=1)
"""Flash attention, forward only, in NumPy: blocks of queries against blocks of keys, softmax online."""
import numpy as np


def flash_attention(Q, K, V, block_q=4, block_k=4):
    """Q: (n, d); K, V: (m, d). Returns softmax(Q K^T / sqrt(d)) V without ever holding an (n, m) array."""
    n, d = Q.shape
    m = K.shape[0]
    scale = 1.0 / np.sqrt(d)
    O = np.zeros((n, V.shape[1]), dtype=Q.dtype)

    for qs in range(0, n, block_q):
        Qi = Q[qs : qs + block_q] * scale
        mi = np.full((Qi.shape[0], 1), -np.inf, dtype=Q.dtype)
        li = np.zeros((Qi.shape[0], 1), dtype=Q.dtype)
        Oi = np.zeros((Qi.shape[0], V.shape[1]), dtype=Q.dtype)
        for ks in range(0, m, block_k):
            Kj, Vj = K[ks : ks + block_k], V[ks : ks + block_k]
            S = Qi @ Kj.T
            m_new = np.maximum(mi, S.max(axis=1, keepdims=True))
            P = np.exp(S - m_new)
            alpha = np.exp(mi - m_new)
            li = alpha * li + P.sum(axis=1, keepdims=True)
            Oi = alpha * Oi + P @ Vj
            mi = m_new
        O[qs : qs + block_q] = Oi / li
    return O
