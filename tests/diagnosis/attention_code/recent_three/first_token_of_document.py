# regard.check(PackedVisionAttention, 32, 4, args=(torch.randn(9, 32), torch.tensor([0, 3, 5, 9], dtype=torch.int32)), axes="tokens dim", causal=False)
# regard.spec(causal=False, heads=4, positions=None, documents=("cu_seqlens",))
"""Packed sequences: block-diagonal attention from cu_seqlens (2025)."""
import torch
from torch import nn
import torch.nn.functional as F


def segment_ids(cu_seqlens, total):
    """The number of the sequence of each of the total tokens; sequence i is cu_seqlens[i] .. cu_seqlens[i + 1] - 1."""
    positions = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=False)  # <- law influence


class PackedVisionAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """hidden_states: (total_tokens, dim), the patches of all images one after the other."""
        n = hidden_states.shape[0]
        q, k, v = self.qkv(hidden_states).reshape(n, 3, self.num_heads, -1).permute(1, 2, 0, 3).unbind(0)
        ids = segment_ids(cu_seqlens, n)
        mask = ids[:, None] == ids[None, :]  # <- law influence
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.proj(out.transpose(0, 1).reshape(n, -1))
