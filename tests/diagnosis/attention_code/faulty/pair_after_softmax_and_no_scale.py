# regard.check(attend, causal=True)
# regard.spec(causal=True)
import torch


def attend(q, k, v):
    weights = torch.softmax(q @ k.mT, dim=-1)  # <- no-scale
    weights = weights * torch.ones_like(weights).tril()  # <- mask-after-softmax
    return weights @ v
