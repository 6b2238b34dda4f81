# regard.check(Attention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scaling = embed_dim**-0.5  # <- scale-by-embed-dim
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.view(b, t, self.num_heads, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.proj(y.transpose(1, 2).reshape(b, t, e))
