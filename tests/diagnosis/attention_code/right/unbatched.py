# regard.check(SelfAttention(6, 4))
# regard.spec(causal=False, heads=1, positions=None)
"""One sentence at a time; transpose(0, 1) would be wrong with a batch, and there is none."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        tokens, _ = x.shape
        queries = x @ self.W_query
        keys = x @ self.W_key
        values = x @ self.W_value
        omega = queries @ keys.transpose(0, 1)
        alpha = torch.softmax(omega / self.d_out**0.5, dim=1)
        assert alpha.shape == (tokens, tokens)
        return alpha @ values
