# regard.check(MultiQueryAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, kv_heads=1, positions=None)
import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, embed_dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = embed_dim // n_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key_value = nn.Linear(embed_dim, 2 * self.head_dim)
        self.dense = nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden, causal_mask=True):
        bsz, length, _ = hidden.shape
        q = self.query(hidden).reshape(bsz, length * self.n_heads, self.head_dim)
        k, v = self.key_value(hidden).split(self.head_dim, dim=-1)
        scores = torch.baddbmm(
            torch.empty(bsz, length * self.n_heads, length, dtype=q.dtype), q, k.transpose(1, 2),
            beta=0, alpha=self.head_dim ** -0.5,
        ).view(bsz, length, self.n_heads, length)
        if causal_mask:
            hidden_keys = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden_keys[None, :, None, :], float("-inf"))
        attn = scores.softmax(dim=-1).view(bsz, length * self.n_heads, length)
        out = torch.bmm(attn, v).view(bsz, length, -1)
        return self.dense(out)
