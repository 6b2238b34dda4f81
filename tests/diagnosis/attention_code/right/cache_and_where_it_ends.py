# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v, past_key=None, past_value=None, start_pos=0):
    """The cache holds start_pos tokens, which the caller says."""
    if past_key is not None:
        k, v = torch.cat([past_key, k], dim=-2), torch.cat([past_value, v], dim=-2)
    query = torch.arange(q.shape[-2])[:, None] + start_pos
    keep = torch.arange(k.shape[-2]) <= query
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v
