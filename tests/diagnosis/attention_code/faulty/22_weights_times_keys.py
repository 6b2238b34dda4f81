# regard.check(attention)
# regard.spec(causal=False)
import torch
import torch.nn.functional as F


def attention(q, k, v):
    weights = F.softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=-1)
    return torch.matmul(weights, k)  # <- wrong-values
