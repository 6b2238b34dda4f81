# regard.check(EncoderLayer, 16, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"attention_mask": "True keeps"})
"""A tokenizer's attention_mask is 1 for tokens; key_padding_mask wants True for padding."""
import torch
from torch import nn


class EncoderLayer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)

    def forward(self, hidden_states, attention_mask=None):
        padding = None if attention_mask is None else attention_mask.bool()
        x, _ = self.attention(hidden_states, hidden_states, hidden_states, key_padding_mask=padding)  # <- mask-inverted
        return x
