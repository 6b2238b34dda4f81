# regard.check(AlibiEncoder(32, 4), causal=False)
# regard.spec(causal=False, heads=4, positions={"kind":"alibi","slopes":[1/4, 1/16, 1/64, 1/256]})
import torch
from torch import nn


class AlibiEncoder(nn.Module):
    """Bidirectional: distant tokens get a lower score."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        pos = torch.arange(n, device=x.device)
        bias = self.slopes[:, None, None] * (pos[None, :] - pos[:, None])  # <- law score
        w = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return self.proj((w @ v).transpose(1, 2).flatten(2))
