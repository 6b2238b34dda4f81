# regard.check(Encoder, 16, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"lengths": "lengths"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x, lengths):
        padding_mask = torch.arange(x.size(1))[None] >= lengths[:, None]
        need = padding_mask.any()
        out, weights = self.attention(x, x, x, need_weights=bool(need))  # <- mask-unused
        return out
