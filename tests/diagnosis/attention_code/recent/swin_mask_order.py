# regard.check(WindowAttention, 24, 3, args=(torch.randn(4,9,24), torch.where(torch.rand(2,9,9).tril(-1)+torch.rand(2,9,9).tril(-1).mT>.9, -100., 0.)), means={'mask': 'added to the scores'})
# regard.spec(causal=False, heads=3, positions=None, padding={"mask": "added to the scores"})
import torch
import torch.nn as nn


class WindowAttention(nn.Module):
    """x: (batch * windows, N, dim), the windows of one image side by side; mask: (windows, N, N), added."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(nW, B_ // nW, self.num_heads, N, N) + mask[:, None, None]  # <- law samples
            attn = attn.view(-1, self.num_heads, N, N)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))
