# regard.check(attention)
# regard.spec(causal=False)
"""The root divides the weights instead of the scores."""
import torch


def attention(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1) / q.shape[-1] ** 0.5  # <- wrong-scale
    return weights @ v
