# regard.check(Decoder, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""diagonal=2 lets each token see the next one, which it is to guess."""
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, tgt):
        size = tgt.size(1)
        tgt_mask = torch.triu(torch.full((size, size), float("-inf")), diagonal=2)  # <- causal-off-by-one
        return self.self_attn(tgt, tgt, tgt, attn_mask=tgt_mask, need_weights=False)[0]  # <- causal-off-by-one
