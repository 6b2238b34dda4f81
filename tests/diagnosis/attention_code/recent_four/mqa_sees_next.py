# regard.check(CausalAttention)
# regard.spec(causal=True, heads=4, kv_heads=1, positions=None)
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


class CausalAttention(nn.Module):
    """Multi-query causal attention: many query heads, one key/value head."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim // heads)
        self.o = nn.Linear(dim, dim)

    @staticmethod
    def visible(n: int, device=None) -> torch.Tensor:
        i = torch.arange(n, device=device)
        return i[:, None] + 1 >= i[None, :]  # <- causal-off-by-one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand(-1, self.heads, -1, -1) for t in self.kv(x).chunk(2, dim=-1))
        y = sdpa(q, k, v, attn_mask=self.visible(x.size(1), x.device))
        return self.o(y.transpose(1, 2).flatten(2))
