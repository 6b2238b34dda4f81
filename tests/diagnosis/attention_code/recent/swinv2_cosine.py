# regard.check(CosineWindowAttention, 24, num_heads=3)
# regard.spec(causal=False, heads=3, positions=None, scale=regard.ANY, qk_norm="l2")
import math
import torch
import torch.nn.functional as F
from torch import nn


class CosineWindowAttention(nn.Module):
    def __init__(self, dim, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * self.logit_scale.clamp(max=math.log(100.0)).exp()
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
