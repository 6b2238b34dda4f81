# regard.check(attend, causal=True)
# regard.spec(causal=True)
"""masked_fill gives a new tensor; the old one is unchanged."""
import torch


def attend(q, k, v):
    t = q.shape[-2]
    scores = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(t, t).triu(1).bool()
    scores.masked_fill(future, float("-inf"))  # <- not-causal
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("...ij,...jd->...id", weights, v)
