# regard.check(CosineCausalAttention)
# regard.spec(causal=True, heads=4, scale=regard.ANY, positions=None, qk_norm="l2")
import torch
import torch.nn as nn
import torch.nn.functional as F


class CosineCausalAttention(nn.Module):
    """Causal attention with QK-norm (Henry et al. 2020): the query and the key of every token and head are scaled
    to length 1, and the cosine is multiplied by a learned temperature."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 8.0))
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, dim = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=2)  # <- law score
        sim = (q @ k.transpose(-2, -1)) * self.temperature
        sim = sim.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        out = sim.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, dim))
