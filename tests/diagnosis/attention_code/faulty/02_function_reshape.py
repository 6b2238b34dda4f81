# regard.check(multihead, h=2)
# regard.spec(causal=False, heads=2)
import torch.nn.functional as F


def multihead(q, k, v, h):
    b, t, d = q.shape
    q = q.reshape(b, h, t, d // h)  # <- heads-split-without-transpose
    k = k.reshape(b, h, t, d // h)  # <- heads-split-without-transpose
    v = v.reshape(b, h, t, d // h)  # <- heads-split-without-transpose
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).reshape(b, t, d)
