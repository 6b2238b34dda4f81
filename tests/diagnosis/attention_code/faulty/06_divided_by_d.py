# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(query, key, value):
    d_k = query.size(-1)
    scores = torch.einsum("...qd,...kd->...qk", query, key) / d_k  # <- wrong-scale
    return torch.einsum("...qk,...kd->...qd", torch.softmax(scores, dim=-1), value)
