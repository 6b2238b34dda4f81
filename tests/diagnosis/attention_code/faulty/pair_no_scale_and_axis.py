# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    scores = q @ k.transpose(-2, -1)  # <- no-scale
    return torch.softmax(scores, dim=-2) @ v  # <- softmax-wrong-axis
