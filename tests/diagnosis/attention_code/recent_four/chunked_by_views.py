# regard.check(ChunkedLocalAttention)
# regard.spec(causal=True, window=regard.ANY, heads=2, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class ChunkedLocalAttention(nn.Module):
    """Causal local attention in chunks of `chunk` tokens: a token sees its own chunk up to itself, and the
    whole chunk before it. Texts of any length; the last chunk is filled up inside."""

    def __init__(self, dim=16, heads=2, chunk=3):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, dim = x.shape
        w = self.chunk
        extra = -n % w
        qkv = F.pad(self.qkv(x), (0, 0, 0, extra))
        c = (n + extra) // w
        q, k, v = qkv.view(b, c, w, 3, self.heads, dim // self.heads).permute(3, 0, 1, 4, 2, 5)  # b c h w d

        def with_previous(t):
            before = torch.cat([torch.zeros_like(t[:, :1]), t[:, :-1]], dim=1)
            return torch.cat([before, t], dim=3)

        k, v = with_previous(k), with_previous(v)
        s = q @ k.transpose(-1, -2) * (dim // self.heads) ** -0.5
        seen = torch.ones(w, 2 * w, dtype=torch.bool, device=x.device).tril(w)
        first = torch.cat([torch.zeros_like(seen[:, :w]), seen[:, w:]], dim=1)
        seen = torch.stack([first] + [seen] * (c - 1))[:, None]
        p = s.masked_fill(~seen, float("-inf")).softmax(-1)
        y = (p @ v).permute(0, 1, 3, 2, 4).reshape(b, n + extra, dim)
        return self.out(y[:, :n])
