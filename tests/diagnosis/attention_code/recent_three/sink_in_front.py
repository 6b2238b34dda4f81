# regard.check(SinkAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None, sinks=True)
"""Attention with a learned sink for each head (2025)."""
import torch
from torch import nn


class SinkAttention(nn.Module):
    """Causal; softmax over the keys and one more logit per head, whose weight is thrown away."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.sinks = nn.Parameter(torch.zeros(num_heads))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        probs = torch.cat([sinks, scores], dim=-1).softmax(dim=-1)
        probs = probs[..., :-1]  # <- law influence
        out = torch.matmul(probs, v).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out)
