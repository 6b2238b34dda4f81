# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions="learned")
"""transpose(0, 1) for a module that already has batch_first."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.positions = nn.Embedding(64, dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        batch_size, seq_len, _ = x.shape
        x = x + self.positions(torch.arange(seq_len))
        x = x.transpose(0, 1)  # <- attends-across-batch
        out, _ = self.attn(x, x, x)  # <- attends-across-batch
        return out.transpose(0, 1)
