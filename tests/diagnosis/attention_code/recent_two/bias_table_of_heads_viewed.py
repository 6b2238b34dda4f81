# regard.check(TableBiasAttention(32, 4, 16))
# regard.spec(causal=False, heads=4, positions="table")
import torch
from torch import nn


class TableBiasAttention(nn.Module):
    def __init__(self, dim, heads, max_len):
        super().__init__()
        self.heads = heads
        self.bias_table = nn.Parameter(torch.randn(heads, 2 * max_len - 1))
        i = torch.arange(max_len)
        self.register_buffer("index", i[:, None] - i[None, :] + max_len - 1, persistent=False)
        self.qkv = nn.Linear(dim, dim * 3)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        table = self.bias_table.view(-1, self.heads)  # <- law heads
        bias = table[self.index[:n, :n]].permute(2, 0, 1)
        w = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1)
        return self.out((w @ v).transpose(1, 2).reshape(b, n, d))
