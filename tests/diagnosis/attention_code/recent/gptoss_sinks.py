# regard.check(AttentionWithSinks, 32, 4, 2, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, sinks=True)
import torch
from torch import nn


class AttentionWithSinks(nn.Module):
    """A learned logit for each head joins the denominator (gpt-oss)."""

    def __init__(self, dim, n_heads, n_kv):
        super().__init__()
        self.n_heads, self.n_kv, self.d = n_heads, n_kv, dim // n_heads
        self.qkv = nn.Linear(dim, (n_heads + 2 * n_kv) * self.d)
        self.sinks = nn.Parameter(torch.randn(n_heads))
        self.out = nn.Linear(n_heads * self.d, dim)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, -1, self.d)
        q, k, v = qkv.split([self.n_heads, self.n_kv, self.n_kv], dim=2)
        k = k.repeat_interleave(self.n_heads // self.n_kv, dim=2)
        v = v.repeat_interleave(self.n_heads // self.n_kv, dim=2)
        qk = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.d**-0.5
        qk = qk + torch.triu(qk.new_full((t, t), -float("inf")), diagonal=1)
        sink = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, 1)
        w = torch.cat([qk, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return self.out(torch.einsum("bhqk,bkhd->bqhd", w, v).reshape(b, t, -1))
