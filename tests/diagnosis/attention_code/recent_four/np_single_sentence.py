# regard.check(self_attention, args=tuple(__import__('numpy').random.randn(6, 8) for _ in range(3)))
# regard.spec(causal=False, heads=1)
import numpy as np


def self_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention over the words of one sentence; q, k, v have the shape (words, dim)."""
    scores = q.dot(k.T) / np.sqrt(k.shape[1])
    exps = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = exps / exps.sum(axis=1)  # <- law mixture
    return weights.dot(v)
