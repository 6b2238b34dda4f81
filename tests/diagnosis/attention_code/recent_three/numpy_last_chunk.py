# regard.check(chunked_attention, args=tuple(np.random.default_rng(0).normal(size=size) for size in [(4, 6, 8), (4, 9, 8), (4, 9, 8)]), axes={"q": "heads tokens dim", "k": "heads tokens dim", "v": "heads tokens dim"}, causal=False)
# regard.spec(causal=False)
"""Memory-saving attention in NumPy: keys in chunks (2024)."""
import numpy as np


def chunked_attention(q, k, v, chunk_size=4):
    """
    q: (heads, n, d), k and v: (heads, m, d)
    Two passes: first the maximum of each row, then the sums.
    """
    scale = 1.0 / np.sqrt(q.shape[-1])
    n_chunks = k.shape[1] // chunk_size or 1  # <- law influence
    chunks = [slice(i * chunk_size, (i + 1) * chunk_size) for i in range(n_chunks)]

    row_max = np.full(q.shape[:2] + (1,), -np.inf, dtype=q.dtype)
    for c in chunks:
        s = scale * q @ k[:, c].transpose(0, 2, 1)
        row_max = np.maximum(row_max, s.max(axis=-1, keepdims=True))

    total = np.zeros_like(row_max)
    out = np.zeros(q.shape[:2] + v.shape[-1:], dtype=q.dtype)
    for c in chunks:
        p = np.exp(scale * q @ k[:, c].transpose(0, 2, 1) - row_max)
        total += p.sum(axis=-1, keepdims=True)
        out += p @ v[:, c]
    return out / total
