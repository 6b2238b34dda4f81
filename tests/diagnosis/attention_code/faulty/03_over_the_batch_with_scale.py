# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return torch.softmax(scores, 0) @ v  # <- softmax-wrong-axis
