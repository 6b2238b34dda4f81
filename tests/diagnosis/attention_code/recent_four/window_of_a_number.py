# regard.check(SlidingWindowAttention)
# regard.spec(causal=True, window=4, heads=4, positions=None)
import torch, torch.nn as nn
class SlidingWindowAttention(nn.Module):
    """Causal sliding window: each token sees itself and the 3 tokens before."""
    def __init__(self, dim=32, heads=4, window=4):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, dim*3); self.proj = nn.Linear(dim, dim)
    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C//self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        i = torch.arange(N)
        d = i[:, None] - i[None]
        ok = (d >= 0) & (d <= self.window)  # <- law influence
        a = (q * (C//self.heads) ** -0.5) @ k.transpose(-2, -1)
        a = a.masked_fill(~ok, float("-inf")).softmax(-1)
        return self.proj((a @ v).transpose(1, 2).reshape(B, N, C))
