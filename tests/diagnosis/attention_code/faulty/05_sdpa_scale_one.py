# regard.check(attend)
# regard.spec(causal=False)
import torch.nn.functional as F


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)  # <- no-scale
