# regard.check(Attention(32, 4).to(torch.bfloat16), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""bfloat16 all the way, except the softmax."""
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / self.head_dim**0.5
        future = torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
        probs = (scores + future).float().softmax(dim=-1).type_as(q)
        return self.wo(torch.matmul(probs, v).transpose(1, 2).reshape(b, s, -1))
