# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    q *= q.shape[-1] ** -0.5  # <- law pure
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v
