# regard.check(Encoder, 16, 2)
# regard.spec(causal=False, heads=2, positions=regard.ANY)
"""nn.TransformerEncoderLayer forgets the batch as well, unless it is told batch_first=True."""
import math

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, d_model, nhead, max_len=64):
        super().__init__()
        angles = torch.arange(max_len)[:, None] * torch.exp(
            torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model)
        )
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("positions", table[None])  # (1, max_len, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=32)  # <- attends-across-batch

    def forward(self, x):
        x = x + self.positions[:, : x.size(1)]
        return self.layer(x)  # <- attends-across-batch
