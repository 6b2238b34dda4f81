# regard.check(PaddedCausalAttention, 32, 4, means={"attention_mask": "True keeps"}, causal=True)
# regard.spec(causal=True, heads=4, positions=None, padding={"attention_mask": "True keeps"})
"""Causal attention over padded texts (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class PaddedCausalAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Causal. attention_mask: (batch, tokens) bool, True = keep."""
        b, t, d = x.shape
        heads = (b, t, self.n_heads, d // self.n_heads)
        q = self.q_proj(x).view(heads).transpose(1, 2)
        k = self.k_proj(x).view(heads).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        allowed = causal[None, None] | attention_mask[:, None, None, :].bool()  # <- law influence
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)  # <- law influence
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))
