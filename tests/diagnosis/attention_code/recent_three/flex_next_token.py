# regard.check(CausalFlexAttention, 32, 4, args=(torch.randn(2, 6, 32), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])), causal=True)
# regard.spec(causal=True, heads=4, positions=None, documents=("doc_ids",))
"""Document-packed GPT attention with FlexAttention (2025)."""
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class CausalFlexAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, doc_ids: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, dim); doc_ids: (batch, tokens), the document of each token."""
        B, T, C = x.shape

        def document_causal(b, h, q_idx, kv_idx):
            causal = q_idx + 1 >= kv_idx  # <- law influence
            same_doc = doc_ids[b, q_idx] == doc_ids[b, kv_idx]
            return causal & same_doc

        block_mask = create_block_mask(document_causal, B=B, H=None, Q_LEN=T, KV_LEN=T, device=str(x.device))
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, block_mask=block_mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))
