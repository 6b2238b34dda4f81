# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch
import torch.nn.functional as F


def attention(query, key, value, *, cache=None):
    if cache is not None:
        key = torch.cat([cache["k"], key], dim=-2)
        value = torch.cat([cache["v"], value], dim=-2)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)  # <- causal-top-left
