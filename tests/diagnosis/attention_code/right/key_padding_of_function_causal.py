# regard.check(attention, causal=True)
# regard.spec(causal=True, padding={"key_padding_mask": "True hides"})
import torch


def attention(q, k, v, key_padding_mask=None):
    n = k.shape[1]
    s = torch.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    if key_padding_mask is not None:
        s = s + torch.zeros(key_padding_mask.shape).masked_fill(key_padding_mask, -1e9)[:, None]
    return torch.einsum("bij,bjd->bid", s.softmax(-1), v)
