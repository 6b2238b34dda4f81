# regard.check(CausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, past=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            k = torch.cat((past["k"], k), 2)
            v = torch.cat((v, past["v"]), 2)  # <- law cache
        n = k.shape[2]
        hidden = torch.arange(n)[None, :] > torch.arange(n - t, n)[:, None]
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)), {"k": k, "v": v}
