# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(Q, K, V):
    # every query times every key, by broadcasting
    scores = (Q.unsqueeze(-2) * K.unsqueeze(-3)).sum(dim=-1)  # <- no-scale
    return torch.einsum("...ij,...jd->...id", scores.softmax(-1), V)
