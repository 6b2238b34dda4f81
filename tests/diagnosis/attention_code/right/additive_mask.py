# regard.check(attend, causal=True)
# regard.spec(causal=True)
import torch


def causal_bias(n):
    return torch.full((n, n), float("-inf")).triu(diagonal=1)


def attend(q, k, v):
    sim = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    sim = sim + causal_bias(sim.shape[-1])
    return torch.einsum("...ij,...jd->...id", sim.softmax(-1), v)
