# regard.check(Attention())
# regard.spec(causal=False, positions=None)
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def forward(self, query, key, value):
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
