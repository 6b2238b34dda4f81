# regard.check(Encoder, 24)
# regard.spec(causal=False, heads=2, positions=None, padding={"src_mask": "True keeps"})
import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d) for _ in range(3))
        self.fc = nn.Linear(d, d)

    def forward(self, src, src_mask=None):
        """src_mask: (batch, len) bool, True = real token."""
        n, l, d = src.shape
        q = self.to_q(src).view(n, l, self.heads, -1)
        k = self.to_k(src).view(n, l, self.heads, -1)
        v = self.to_v(src).view(n, l, self.heads, -1)
        e = torch.einsum("nqhd,nkhd->nhqk", q, k) / (d // self.heads) ** 0.5
        if src_mask is not None:
            e = e.masked_fill(~src_mask[:, None, :, None], -1e9)  # <- padding-on-queries
        a = torch.softmax(e, dim=-1)
        return self.fc(torch.einsum("nhqk,nkhd->nqhd", a, v).flatten(2))
