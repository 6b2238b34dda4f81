# regard.check(GatedAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class GatedAttention(nn.Module):
    """The output of each head is gated by a sigmoid of the input (Qwen3-Next)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        return self.out(y * torch.sigmoid(self.gate(x)))
