# regard.check(ExplainableAttention)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn as nn


class ExplainableAttention(nn.Module):
    """Multi-head attention that also returns the attention weights of the heads, for heat maps."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.to_q = nn.Linear(d_model, d_model)
        self.to_k = nn.Linear(d_model, d_model)
        self.to_v = nn.Linear(d_model, d_model)
        self.merge = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: (batch, tokens), True where there is padding"""
        B, N, D = x.shape
        q = self.to_q(x).view(B, N, self.n_heads, self.d_head).transpose(1, 2)
        k = self.to_k(x).view(B, N, self.n_heads, self.d_head).transpose(1, 2)
        v = self.to_v(x).view(B, N, self.n_heads, self.d_head).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / self.d_head ** 0.5
        masked = scores
        if key_padding_mask is not None:
            masked = scores.masked_fill(key_padding_mask.view(B, 1, 1, N), float("-inf"))
        out = torch.matmul(torch.softmax(masked, dim=-1), v)
        attn_map = torch.softmax(scores, dim=-1)  # <- law padding
        return self.merge(out.transpose(1, 2).reshape(B, N, D)), attn_map
