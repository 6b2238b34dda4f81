# regard.check(Encoder, 16, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)

    def forward(self, hidden_states, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        return self.attention(
            hidden_states, hidden_states, hidden_states, key_padding_mask=padding, need_weights=False
        )[0]
