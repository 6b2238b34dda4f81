# regard.check(CrossAttention, 24, context_dim=20, heads=3, args=(torch.randn(2,4,24), torch.randn(2,7,20), torch.arange(7)<torch.tensor([[7],[5]])))
# regard.spec(heads=3, positions=None, padding={"context_mask": "True keeps"})
import torch
from torch import nn


class CrossAttention(nn.Module):
    """Latents attend to a context (Perceiver).

    context_mask: (batch, context tokens) bool, True = may be attended to.
    """

    def __init__(self, dim, context_dim=None, heads=3, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm_ctx = nn.LayerNorm(context_dim or dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim or dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim)

    def forward(self, x, context, context_mask=None):
        q = self.to_q(x)
        k, v = self.to_kv(self.norm_ctx(context)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        sim = q @ k.mT * self.scale
        if context_mask is not None:
            sim = sim.masked_fill(~context_mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = sim.softmax(dim=-1) @ v
        return self.to_out(out.transpose(1, 2).flatten(-2))
