# regard.check(attention)
# regard.spec(causal=False)
"""One softmax for all pairs of a sentence."""
import torch


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = torch.softmax(scores.flatten(-2), dim=-1).view_as(scores)  # <- softmax-wrong-axis
    return weights @ v
