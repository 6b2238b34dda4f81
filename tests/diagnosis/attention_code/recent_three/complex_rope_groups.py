# regard.check(LlamaAttention, 32, 4, 2, args=(torch.randn(2, 6, 32), torch.polar(torch.ones(6, 4), torch.arange(6)[:, None] * 10.0 ** -torch.arange(4))), causal=True)
"""Attention of a small Llama with a cache of rotated keys (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def apply_rope(x, freqs_cis):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis).flatten(-2).type_as(x)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.n_rep = n_heads // n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Causal. freqs_cis: complex (tokens, head_dim // 2)."""
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, freqs_cis), apply_rope(k, freqs_cis)
        if self.n_rep > 1:
            k = k.repeat(1, self.n_rep, 1, 1)  # <- kv-heads-repeated-in-wrong-order
            v = v.repeat(1, self.n_rep, 1, 1)  # <- kv-heads-repeated-in-wrong-order
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))
