# regard.check(MultiHead, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * (d // self.heads) ** -0.5
        sim = sim.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, q)  # <- wrong-values
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))
