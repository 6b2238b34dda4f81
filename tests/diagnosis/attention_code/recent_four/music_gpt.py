# regard.check(CausalMusicTransformer, args=(torch.randint(0, 40, (2, 8)),), causal=True)
# regard.spec(causal=True, heads=2, positions="learned")
"""Event-based music generation, decoder-only."""
import torch
from torch import nn


class CausalBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d)
        self.norm2 = nn.LayerNorm(d)
        self.wqkv = nn.Linear(d, 3 * d)
        self.wo = nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def attend(self, x):
        b, t, d = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / (d // self.heads) ** 0.5
        s = s + torch.triu(torch.full((t, t), float("-inf"), device=x.device), diagonal=2)  # <- causal-off-by-one
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.ff(self.norm2(x))


class CausalMusicTransformer(nn.Module):
    def __init__(self, n_events=40, d=16, heads=2, depth=2, max_len=64):
        super().__init__()
        self.event = nn.Embedding(n_events, d)
        self.time = nn.Parameter(torch.randn(1, max_len, d) * 0.1)
        self.blocks = nn.Sequential(*[CausalBlock(d, heads) for _ in range(depth)])
        self.out = nn.Linear(d, n_events)

    def forward(self, events):
        x = self.event(events) + self.time[:, : events.shape[1]]
        return self.out(self.blocks(x))
