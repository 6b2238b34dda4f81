# regard.check(PositionedAttention, 32, 4, args=(torch.randn(2, 6, 32), torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]])), causal=True)
# regard.spec(causal=True, heads=4, positions="learned")
"""GPT attention layer with learned positions inside (2022)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class PositionedAttention(nn.Module):
    """Causal; position_ids, (batch, tokens), choose the rows of the position table (default 0, 1, 2, ...)."""

    def __init__(self, dim, heads, max_positions=64):
        super().__init__()
        self.heads = heads
        self.wpe = nn.Embedding(max_positions, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, inputs_embeds, position_ids=None):
        b, t, d = inputs_embeds.shape
        positions = torch.arange(t, device=inputs_embeds.device).unsqueeze(0)  # <- law positions
        x = inputs_embeds + self.wpe(positions)  # <- law positions
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))
