# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch
import torch.nn.functional as F


def attention(q, k, v, past_k=None, past_v=None):
    if past_k is not None:
        k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # <- causal-top-left
