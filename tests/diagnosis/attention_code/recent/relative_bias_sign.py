# regard.check(RelativeBiasAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions="table")
import torch
import torch.nn as nn


class RelativeBiasAttention(nn.Module):
    """Causal attention with a learned bias for each distance 0 ... max_distance - 1."""

    def __init__(self, dim, heads, max_distance=16):
        super().__init__()
        self.heads, self.max_distance = heads, max_distance
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.rel_bias = nn.Parameter(torch.randn(max_distance, heads))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        pos = torch.arange(t, device=x.device)
        distance = (pos[None, :] - pos[:, None]).clamp(0, self.max_distance - 1)  # <- law gradient
        bias = self.rel_bias[distance].permute(2, 0, 1)
        s = q @ k.mT / (d // self.heads) ** 0.5 + bias
        s = s.masked_fill(pos[None, :] > pos[:, None], float("-inf"))
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
