# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch.nn.functional as F


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
