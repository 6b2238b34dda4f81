# regard.check(PackedCausalAttention(24, 3), args=(torch.randn(2, 7, 24), torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]])), causal=True)
# regard.spec(causal=True, heads=3, positions=None, documents=("doc_ids",))
import torch
import torch.nn as nn


class PackedCausalAttention(nn.Module):
    """Tokens attend to earlier tokens of their own document."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, width * 3, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x, doc_ids):
        n, t, w = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        same = doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1)
        past = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        visible = (same & past).unsqueeze(1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.proj(out.transpose(1, 2).flatten(2))
