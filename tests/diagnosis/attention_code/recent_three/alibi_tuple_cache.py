# regard.check(AlibiCausalAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"alibi","slopes":[1/4, 1/16, 1/64, 1/256]})
"""Causal attention with linear biases (ALiBi) and a tuple of past keys and values."""
import math

import torch
import torch.nn as nn


def get_slopes(n_heads):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n_heads).is_integer():
        return power_of_2(n_heads)
    closest = 2 ** math.floor(math.log2(n_heads))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n_heads - closest]


class AlibiCausalAttention(nn.Module):
    def __init__(self, hidden_size, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = hidden_size // n_heads
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("slopes", torch.tensor(get_slopes(n_heads)), persistent=False)

    def forward(self, x, past_key_value=None):
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, self.n_heads, self.head_dim).transpose(1, 2) for t in self.Wqkv(x).chunk(3, dim=-1)
        )
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], dim=2)
            v = torch.cat([past_key_value[1], v], dim=2)
        total = k.size(2)
        q_pos = torch.arange(total - s, total, device=x.device)
        k_pos = torch.arange(total, device=x.device)
        distance = k_pos[None, :] - q_pos[:, None]  # <= 0 for the past
        bias = self.slopes[:, None, None] * distance
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim) + bias
        scores = scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min)
        context = torch.matmul(torch.softmax(scores, dim=-1), v)
        context = context.transpose(1, 2).reshape(b, s, -1)
        return self.out_proj(context), (k, v)
