# regard.check(SelfAttention, 16, 4, axes="tokens batch dim")
# regard.spec(causal=False, heads=4, positions=None)
"""Everything is (time, batch, channels), as in fairseq."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(channels, 3 * channels)
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x):
        """x: (time, batch, channels)"""
        tgt_len, bsz, channels = x.shape
        head_dim = channels // self.heads
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q.contiguous().view(tgt_len, bsz * self.heads, head_dim).transpose(0, 1)
        k = k.contiguous().view(tgt_len, bsz * self.heads, head_dim).transpose(0, 1)
        v = v.contiguous().view(tgt_len, bsz * self.heads, head_dim).transpose(0, 1)
        attn = torch.bmm(q, k.transpose(1, 2)).div(head_dim**0.5).softmax(dim=-1)
        out = torch.bmm(attn, v)
        out = out.transpose(0, 1).contiguous().view(tgt_len, bsz, channels)
        return self.out_proj(out)
