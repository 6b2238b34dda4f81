# regard.check(causal_attention)
# regard.spec(causal=True)
import numpy as np


def softmax(z, axis=-1):
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)


def causal_attention(Q, K, V):
    n, d = Q.shape[-2:]
    S = Q @ np.swapaxes(K, -1, -2) / np.sqrt(d)
    S = np.where(np.tri(n, dtype=bool), S, -np.inf)
    return softmax(S) @ V
