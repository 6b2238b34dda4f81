# regard.check(attend, causal=True)
# regard.spec(causal=True)
import torch


def attend(q, k, v):
    n = q.size(-2)
    w = torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-1)
    w = w.masked_fill(torch.ones(n, n).triu(1) == 1, 0.0)  # <- mask-after-softmax
    return w @ v
