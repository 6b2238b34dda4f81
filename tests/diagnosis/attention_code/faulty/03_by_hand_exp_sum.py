# regard.check(attend, causal=True)
# regard.spec(causal=True, heads=1)
"""A softmax in three lines, with the sum over the queries."""
import torch


def attend(query, key, value):
    n = query.shape[-2]
    scores = torch.einsum("bqd,bkd->bqk", query, key) * query.shape[-1] ** -0.5
    scores = scores + torch.full((n, n), float("-inf")).triu(1)
    scores = scores - scores.amax(-2, keepdim=True)
    e = scores.exp()
    weights = e / e.sum(dim=-2, keepdim=True)  # <- softmax-wrong-axis
    return torch.einsum("bqk,bkd->bqd", weights, value)
