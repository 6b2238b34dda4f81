# regard.check(local_attention, causal=False)
# regard.spec(causal=False, window=(2, 2))
import torch


def local_attention(query, key, value, window=2):
    """Banded self-attention: every token sees itself and the `window` tokens on either side of it.

    query, key, value: (batch, heads, tokens, dim)
    """
    n, d = query.shape[-2:]
    idx = torch.arange(n, device=query.device)
    near = (idx[:, None] - idx[None, :]).abs() < window  # <- law influence
    logits = torch.einsum("...id,...jd->...ij", query, key) * d ** -0.5
    logits = torch.where(near, logits, torch.full_like(logits, float("-inf")))
    return torch.einsum("...ij,...jd->...id", torch.softmax(logits, -1), value)
