# regard.check(masked_softmax)
# regard.spec(causal=True)
import torch


def masked_softmax(scores):
    """Weights of a causal average: row i over the first i + 1."""
    n = scores.shape[-1]
    scores = scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf"))
    return torch.softmax(scores, dim=-1)
