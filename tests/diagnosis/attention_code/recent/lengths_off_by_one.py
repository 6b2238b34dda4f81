# regard.check(PooledAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"lengths": "lengths"})
import torch
import torch.nn.functional as F
from torch import nn


class PooledAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, lengths: torch.Tensor):
        """lengths: (batch,) int64, the number of real tokens of each sample."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keep = torch.arange(t, device=x.device)[None, :] <= lengths[:, None]  # <- law padding
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.out(y.transpose(1, 2).reshape(b, t, d))
