# regard.check(Attention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x, past_key_value=None):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if past_key_value is not None:
            past_key, past_value = past_key_value
            k, v = torch.cat((past_key, k), -2), torch.cat((past_value, v), -2)
        present = (k, v)
        T, S = q.shape[-2], k.shape[-2]
        keep = torch.tril(torch.ones(T, S))  # <- causal-top-left
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(keep == 0, float("-inf"))  # <- causal-top-left
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o(y), present
