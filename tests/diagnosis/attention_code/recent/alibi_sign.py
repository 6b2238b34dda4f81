# regard.check(AlibiAttention, 24, 4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "alibi", "slopes": [1/4, 1/16, 1/64, 1/256]})
import torch
import torch.nn as nn


class AlibiAttention(nn.Module):
    """Attention with linear biases (ALiBi)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1)))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        pos = torch.arange(t, device=x.device)
        alibi = (pos.view(-1, 1) - pos.view(1, -1)) * self.slopes.view(-1, 1, 1)  # <- law score
        scores = q @ k.mT / (d // self.heads) ** 0.5 + alibi
        scores = scores.masked_fill(pos.view(1, -1) > pos.view(-1, 1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
