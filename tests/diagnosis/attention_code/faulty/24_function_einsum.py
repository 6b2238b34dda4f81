# regard.check(attention, heads=2)
# regard.spec(causal=False, heads=2)
import torch


def attention(q, k, v, heads):
    b, t, d = q.shape
    q, k, v = (x.view(b, t, heads, d // heads) for x in (q, k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (d // heads) ** -0.5  # <- heads-and-tokens-exchanged
    out = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)
    return out.reshape(b, t, d)
