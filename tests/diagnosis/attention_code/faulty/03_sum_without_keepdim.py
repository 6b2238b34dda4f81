# regard.check(attend)
# regard.spec(causal=False, heads=1)
import torch


def attend(q, k, v):
    """q, k, v: (tokens, dim)"""
    n, d = q.shape
    e = torch.exp(q @ k.T / d**0.5)
    weights = e / e.sum(-1)  # <- softmax-wrong-axis
    return weights @ v
