# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    """exp over its sum, with the maximum taken off first."""
    logits = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    logits = logits - logits.max(dim=-1, keepdim=True).values
    e = torch.exp(logits)
    return torch.einsum("...ij,...jd->...id", e, v) / e.sum(dim=-1, keepdim=True)
