# regard.check(attend)
# regard.spec(causal=False, heads=1)
import numpy as np


def attend(query, key, value):
    """One sentence: query, key, value are (tokens, dim) arrays."""
    s = query @ key.T / np.sqrt(key.shape[1])
    e = np.exp(s - s.max(axis=1, keepdims=True))
    w = e / e.sum(axis=1, keepdims=True)
    return w.T @ value  # <- values-mixed-along-wrong-axis
