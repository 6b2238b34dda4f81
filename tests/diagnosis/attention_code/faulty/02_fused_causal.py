# regard.check(Attention(24, 4), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = [
            t.contiguous().view(B, self.n_head, T, C // self.n_head)  # <- heads-split-without-transpose
            for t in (q, k, v)
        ]
        att = torch.einsum("bhid,bhjd->bhij", q, k) * (C // self.n_head) ** -0.5
        keep = torch.ones(T, T, dtype=torch.bool).tril()
        att = torch.where(keep, att, torch.tensor(float("-inf"))).softmax(dim=-1)
        y = torch.einsum("bhij,bhjd->bihd", att, v).reshape(B, T, C)
        return self.proj(y)
