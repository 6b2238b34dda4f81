# regard.check(Attention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """One fused layer for the pieces of all heads."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd // n_head, 3 * (n_embd // n_head))
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        pieces = x.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q, k, v = self.qkv(pieces).chunk(3, dim=-1)  # <- heads-share-projection
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))
