# regard.check(CausalDictAttention(32, 4))
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CausalDictAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cache=None):
        """cache: dict with "k" and "v"; pass {} for the first tokens."""
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            if "k" in cache:
                k = torch.cat([k, cache["k"]], dim=2)  # <- law cache
                v = torch.cat([v, cache["v"]], dim=2)  # <- law cache
            cache["k"], cache["v"] = k, v
        S = k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(diagonal=S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))
