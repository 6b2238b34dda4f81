# regard.check(PackedAttention, 32, 4, args=(torch.randn(2, 6, 32), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])), causal=True)
# regard.spec(causal=True, heads=4, positions=None, documents=("document_ids",))
"""Packed documents: a token sees its own document up to itself."""
import torch
from torch import Tensor, nn
import torch.nn.functional as F


def document_causal_mask(document_ids: Tensor) -> Tensor:
    """(batch, tokens) -> (batch, 1, tokens, tokens), True where attention is allowed."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    T = document_ids.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal).unsqueeze(1)


class PackedAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=document_causal_mask(document_ids))
        return self.wo(y.transpose(1, 2).flatten(2))
