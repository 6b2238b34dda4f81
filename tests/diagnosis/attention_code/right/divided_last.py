# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    """The values are summed with exp, and divided by the sum of exp at the very end."""
    scores = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = torch.einsum("...ij->...i", e)
    return torch.einsum("...ij,...jd->...id", e, v) / total[..., None]
