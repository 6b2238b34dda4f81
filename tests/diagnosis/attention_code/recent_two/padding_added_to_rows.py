# regard.check(BertSelfAttention(32, 4))
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
import math

import torch
from torch import nn


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask):
        """attention_mask: (batch, tokens), 1 = token, 0 = padding."""
        b, n, d = hidden_states.shape
        q, k, v = (f(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
                   for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.num_heads)
        scores = scores + (1.0 - attention_mask[:, None, :, None].float()) * -10000.0  # <- mask-unused
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)
