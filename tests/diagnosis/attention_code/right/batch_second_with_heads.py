# regard.check(MultiheadAttention, 20, 5, causal=True, axes="tokens batch dim")
# regard.spec(causal=True, heads=5, positions=None)
"""labml's way: (seq, batch, heads, dim), and a softmax over the keys, which are axis 1 there."""
import torch
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value, self.output = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        seq_len, batch_size, _ = x.shape
        shape = (seq_len, batch_size, self.heads, self.d_k)
        q, k, v = (f(x).view(shape) for f in (self.query, self.key, self.value))
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.d_k**-0.5
        later = torch.ones(seq_len, seq_len).triu(1).bool()[:, :, None, None]
        attn = self.softmax(scores.masked_fill(later, float("-inf")))
        x = torch.einsum("ijbh,jbhd->ibhd", attn, v)
        return self.output(x.reshape(seq_len, batch_size, -1))
