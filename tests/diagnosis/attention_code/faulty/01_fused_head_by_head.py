# regard.check(MultiheadAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, return_attention=False):
        batch, length, dim = x.size()
        qkv = self.qkv_proj(x).reshape(batch, length, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        attention = F.softmax(torch.matmul(q, k.transpose(-2, -1)) / q.size(-1) ** 0.5, dim=-1)
        values = torch.matmul(attention, v)
        values = values.reshape(batch, length, dim)  # <- heads-merged-without-transpose
        o = self.o_proj(values)
        return (o, attention) if return_attention else o
