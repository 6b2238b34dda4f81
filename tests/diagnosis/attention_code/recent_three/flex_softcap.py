# regard.check(SoftcapAttention, 32, 4, 2, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, softcap=50.0)
"""Gemma-2 style attention with FlexAttention: causal, logits capped by tanh."""
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make_softcap(cap: float):
    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return score_mod


class SoftcapAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, cap: float = 50.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(dim, 2 * n_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.score_mod = make_softcap(cap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv_proj(x).view(B, T, 2, self.n_kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        block_mask = create_block_mask(causal, B=None, H=None, Q_LEN=T, KV_LEN=T, device=str(x.device))
        out = flex_attention(q, k, v, score_mod=self.score_mod, block_mask=block_mask, enable_gqa=True)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, -1))
