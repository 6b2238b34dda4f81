# regard.check(attention, heads=3)
# regard.spec(causal=False, heads=3)
import torch


def attention(q, k, v, heads):
    b, n, d = q.shape
    q, k, v = (x.reshape(b, n, heads, d // heads) for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / (d // heads) ** 0.5
    out = torch.einsum("bhij,bjhd->bhid", scores.softmax(-1), v)
    return out.reshape(b, n, d)  # <- heads-merged-without-transpose
