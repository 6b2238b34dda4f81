# regard.check(CausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions={"kind":"rotary","base":100.0,"pairing":"neighbours"})
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def rope(self, x, start=0):
        pos = torch.arange(start, start + x.shape[2], device=x.device)
        ang = pos[:, None] / 100 ** (torch.arange(0, self.hd, 2, device=x.device) / self.hd)
        lo, hi = x[..., ::2], x[..., 1::2]
        return torch.stack((lo * ang.cos() - hi * ang.sin(), hi * ang.cos() + lo * ang.sin()), -1).flatten(3)

    def forward(self, x, layer_past=None):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, self.hd).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        start = 0
        if layer_past is not None:
            start = layer_past[0].shape[2]
            k = torch.cat((layer_past[0], k), dim=2)
            v = torch.cat((layer_past[1], v), dim=2)
        k = self.rope(k)
        q = self.rope(q, start)
        present = (k, v)  # <- law cache
        s = q @ k.mT / self.hd**0.5
        s = s.masked_fill(torch.ones(t, start + t, device=x.device).tril(start) == 0, -torch.inf)
        return self.o_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)), present
