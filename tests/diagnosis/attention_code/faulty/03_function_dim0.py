# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    w = torch.softmax(scores, dim=0)  # <- softmax-wrong-axis
    return w @ v
