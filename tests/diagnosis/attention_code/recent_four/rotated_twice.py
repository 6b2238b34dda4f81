# regard.check(RotaryDecoderAttention)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","base":1e4,"pairing":"neighbours"})
import torch
import torch.nn as nn


def rotate(x, positions):
    """x: (b, h, t, d), pairs (0,1), (2,3), ..."""
    d = x.shape[-1]
    w = 10000 ** (-torch.arange(0, d, 2, dtype=x.dtype, device=x.device) / d)
    ang = positions.to(x.dtype)[:, None] * w
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.stack([even * ang.cos() - odd * ang.sin(), even * ang.sin() + odd * ang.cos()], -1)
    return out.flatten(-2)


class RotaryDecoderAttention(nn.Module):
    """Causal. `cache` is None for the first piece of a text, then what the call before returned."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        if cache is not None:
            k = torch.cat([cache["keys"], k], 2)
            v = torch.cat([cache["values"], v], 2)
        s = k.shape[2]
        everything = torch.arange(s, device=x.device)
        q = rotate(q, everything[s - t:])
        k = rotate(k, everything)  # <- law cache
        cache = {"keys": k, "values": v}
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(everything[None, :] > everything[s - t:, None], float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        return self.to_out(y), cache
