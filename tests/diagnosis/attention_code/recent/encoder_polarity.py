# regard.check(Encoder, 24)
# regard.spec(causal=False, heads=3, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mha = nn.MultiheadAttention(dim, 3, batch_first=True)

    def forward(self, x, attention_mask=None):
        """attention_mask: (batch, tokens), 1 = word, 0 = padding"""
        hide = None if attention_mask is None else attention_mask.bool()
        return self.mha(x, x, x, key_padding_mask=hide, need_weights=False)[0]  # <- mask-inverted
