# regard.check(EncoderAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
import torch.nn.functional as F
from torch import nn


class EncoderAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        b, n, d = hidden_states.shape
        q = self.query(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.key(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
        v = self.value(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
        context = F.scaled_dot_product_attention(q, k, v)  # <- mask-unused
        return context.transpose(1, 2).reshape(b, n, d)
