# regard.check(local_attention, causal=True)
# regard.spec(causal=True, window=3)
import torch
import torch.nn.functional as F


def local_attention(q, k, v, window: int = 3):
    """Each position sees itself and the ``window - 1`` positions before it."""
    n = q.size(-2)
    i = torch.arange(n, device=q.device)
    delta = i[:, None] - i[None, :]
    allowed = (delta >= 0) & (delta < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
