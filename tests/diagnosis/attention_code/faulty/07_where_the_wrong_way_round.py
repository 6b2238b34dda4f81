# regard.check(attend, causal=True)
# regard.spec(causal=True)
import torch


def attend(q, k, v):
    n = q.shape[-2]
    past = torch.ones(n, n, dtype=torch.bool).tril()
    s = torch.einsum("...id,...jd->...ij", q, k) * q.shape[-1] ** -0.5
    s = torch.where(past, torch.full_like(s, -1e9), s)  # <- mask-inverted
    return s.softmax(-1) @ v
