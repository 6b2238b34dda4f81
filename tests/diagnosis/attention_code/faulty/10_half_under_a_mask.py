# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"mask": "True keeps"})
"""float16 ends at 65504, which only shows once there is a mask."""
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = (q @ k.mT / q.shape[-1] ** 0.5).half()
        if mask is not None:
            s = s.masked_fill(mask[:, None, None, :] == 0, -1e9)  # <- mask-fill-value
        return self.o((s.float().softmax(-1) @ v).transpose(1, 2).flatten(2))
