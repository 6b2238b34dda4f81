# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v, past_k=None, past_v=None):
    if past_k is not None:
        k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
    t, s = q.shape[-2], k.shape[-2]
    keep = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v
