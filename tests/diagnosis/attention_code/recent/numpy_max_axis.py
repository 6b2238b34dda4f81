# regard.check(self_attention)
# regard.spec(causal=False)
import numpy as np


def self_attention(Q, K, V):
    scores = np.matmul(Q, K.swapaxes(-1, -2)) / np.sqrt(Q.shape[-1])
    scores = scores - scores.max(axis=-2, keepdims=True)  # <- law score
    e = np.exp(scores)
    return (e / e.sum(axis=-1, keepdims=True)) @ V
