# regard.check(attention, causal=True)
# regard.spec(causal=True, heads=1)
import math

import torch


def attention(q, k, v):
    n = q.shape[1]
    mask = torch.tril(torch.ones(n, n)).bool()
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    scores[:, mask] = float("-inf")  # <- mask-inverted
    return scores.softmax(-1).nan_to_num() @ v
