# regard.check(MultiHeadAttention, 24, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, hidden)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q = self.q(x).reshape(b, n, self.heads, -1).transpose(1, 2)
        k = self.k(x).reshape(b, n, self.heads, -1).transpose(1, 2)
        v = self.v(x).reshape(b, n, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-1, -2)) / (d // self.heads) ** 0.5
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.o(out.transpose(1, 2).reshape(b, n, d))
