# regard.check(GemmaAttention, 32, heads=4, kv_heads=2, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, softcap=50.0)
import torch
from torch import nn


class GemmaAttention(nn.Module):
    def __init__(self, dim, heads=4, kv_heads=2, cap=50.0):
        super().__init__()
        self.heads, self.kv_heads, self.cap = heads, kv_heads, cap
        self.hd = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.hd, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.o_proj = nn.Linear(heads * self.hd, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        g = self.heads // self.kv_heads
        q = self.q_proj(x).view(b, t, self.kv_heads, g, self.hd)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.hd)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.hd)
        logits = torch.einsum("btkgd,bskd->bkgts", q * self.hd**-0.5, k)
        logits = self.cap * torch.tanh(logits / self.cap)
        keep = torch.ones(t, t, device=x.device, dtype=torch.bool).tril()
        probs = logits.where(keep, torch.finfo(logits.dtype).min).softmax(-1)
        y = torch.einsum("bkgts,bskd->btkgd", probs, v)
        return self.o_proj(y.reshape(b, t, -1))
