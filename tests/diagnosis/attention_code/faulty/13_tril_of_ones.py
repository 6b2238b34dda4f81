# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v):
    """q: the newest tokens; k and v: those of the cache, and the newest ones behind them."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    keep = torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool))  # <- causal-top-left
    return torch.softmax(scores.masked_fill(~keep, float("-inf")), dim=-1) @ v  # <- causal-top-left
