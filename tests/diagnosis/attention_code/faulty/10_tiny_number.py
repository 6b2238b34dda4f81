# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""-1e-9 for -1e9: one sign too many."""
import torch
import torch.nn.functional as F


def attention(q, k, v):
    n = q.shape[-2]
    scores = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    mask = torch.tril(torch.ones(n, n))
    scores = scores.masked_fill(mask == 0, -1e-9)  # <- mask-fill-value
    return torch.matmul(F.softmax(scores, dim=-1), v)
