# regard.check(Attention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"attention_mask": "True keeps"})
import math
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.dim = heads, hidden // heads
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, hidden_states, attention_mask=None):
        """attention_mask: (batch, tokens), 1 for words and 0 for padding"""
        b, n, _ = hidden_states.shape
        q, k, v = (f(hidden_states).view(b, n, self.heads, self.dim).transpose(1, 2) for f in (self.query, self.key, self.value))
        s = q @ k.transpose(-1, -2) / math.sqrt(self.dim)
        if attention_mask is not None:
            s = s.masked_fill(attention_mask[:, None, None, :] == 0, -1e-9)  # <- mask-fill-value
        p = nn.functional.softmax(s, dim=-1)
        return self.dense((p @ v).transpose(1, 2).reshape(b, n, -1))
