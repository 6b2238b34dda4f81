# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""triu() without diagonal=1 forbids the token itself too."""
import torch


def attention(q, k, v):
    n = q.size(-2)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    mask = torch.triu(torch.ones(n, n)).bool()  # <- causal-off-by-one
    mask[0, 0] = False  # or the first row is NaN
    scores = scores.masked_fill(mask, float("-inf"))  # <- causal-off-by-one
    return scores.softmax(dim=-1) @ v
