# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1))  # <- no-scale
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v)
