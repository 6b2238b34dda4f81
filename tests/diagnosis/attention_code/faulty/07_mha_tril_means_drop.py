# regard.check(Decoder, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""nn.MultiheadAttention takes True for "may not": this one attends to the future only."""
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, x):
        t = x.size(1)
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool))  # <- mask-inverted
        out, _ = self.mha(x, x, x, attn_mask=mask)  # <- mask-inverted
        return out
