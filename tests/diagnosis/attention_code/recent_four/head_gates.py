# regard.check(GatedCausalAttention, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedCausalAttention(nn.Module):
    """Causal attention whose heads are gated: the output of head h is multiplied by one sigmoid gate, the h-th, computed
    from the token, before the heads are mixed."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.gate_proj = nn.Linear(dim, heads)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, c)
        gate = torch.sigmoid(self.gate_proj(x))
        gate = gate.repeat_interleave(self.head_dim, dim=-1)
        return self.out_proj(y * gate)
