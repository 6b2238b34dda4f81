# regard.check(LatentAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""DeepSeek's latent attention: keys and values come out of one narrow vector, normed."""
import torch
import torch.nn.functional as F
from torch import nn


class LatentAttention(nn.Module):
    def __init__(self, dim, heads, latent=6):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.down, self.norm, self.up = nn.Linear(dim, latent), nn.LayerNorm(latent), nn.Linear(latent, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.up(self.norm(self.down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
