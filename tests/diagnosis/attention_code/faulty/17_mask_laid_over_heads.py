# regard.check(Attention, 12, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"attention_mask": "True keeps"})
"""(batch, 1, tokens) against (batch, heads, queries, keys): the mask's batch meets the heads."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / (d // self.heads) ** 0.5
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)  # <- mask-of-another-sample
        return self.proj(torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).flatten(2))
