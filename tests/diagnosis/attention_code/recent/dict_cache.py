# regard.check(DecoderAttention, 24, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch
import torch.nn as nn


class DecoderAttention(nn.Module):
    def __init__(self, d, nh):
        super().__init__()
        self.nh = nh
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x, cache: dict | None = None):
        B, T, D = x.shape
        q = self.q(x).reshape(B, T, self.nh, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(B, T, 2, self.nh, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if cache:
            k = torch.cat([cache["k"], k], dim=2)
            v = torch.cat([cache["v"], v], dim=2)
        new_cache = {"k": k, "v": v}
        S = k.shape[2]
        past = S - T
        visible = torch.arange(S)[None, :] <= (torch.arange(T) + past)[:, None]
        att = (q @ k.mT) * q.shape[-1] ** -0.5
        att = att.masked_fill(~visible.to(att.device), float("-inf")).softmax(dim=-1)
        return self.out((att @ v).transpose(1, 2).reshape(B, T, D)), new_cache
