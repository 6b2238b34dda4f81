# regard.check(MultiHeadAttention(32, 4), args=(np.random.default_rng(0).normal(size=(2, 6, 32)),), causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""Transformer layers in NumPy, for teaching (2025)."""
import numpy as np


def softmax(z, axis=1):  # <- softmax-wrong-axis
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)


class MultiHeadAttention:
    def __init__(self, d_model, n_heads, seed=0):
        rng = np.random.default_rng(seed)
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        bound = 1 / np.sqrt(d_model)
        self.Wq, self.Wk, self.Wv, self.Wo = rng.uniform(-bound, bound, (4, d_model, d_model))

    def _heads(self, x):
        b, t, _ = x.shape
        return x.reshape(b, t, self.n_heads, self.d_head).transpose(0, 2, 1, 3)

    def __call__(self, x):
        """x: (batch, tokens, d_model)"""
        b, t, d = x.shape
        q, k, v = self._heads(x @ self.Wq), self._heads(x @ self.Wk), self._heads(x @ self.Wv)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(self.d_head)
        attn = softmax(scores)  # <- softmax-wrong-axis
        out = (attn @ v).transpose(0, 2, 1, 3).reshape(b, t, d)
        return out @ self.Wo
