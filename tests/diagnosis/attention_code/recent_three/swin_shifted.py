# regard.check(ShiftedWindowAttention, 32, 4, args=(torch.randn(2, 8, 8, 32),), causal=False)
# regard.spec(causal=False, window=regard.ANY, heads=4, positions=None)
"""Shifted windows over a channels-last feature map (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ShiftedWindowAttention(nn.Module):
    def __init__(self, dim, num_heads, window=4, shift=2):
        super().__init__()
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def partition(self, x):
        B, H, W, C = x.shape
        w = self.window
        x = x.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(B, (H // w) * (W // w), w * w, C)

    def merge(self, x, H, W):
        B, _, _, C = x.shape
        w = self.window
        x = x.view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(B, H, W, C)

    def region_mask(self, H, W, device):
        ids = torch.zeros(1, H, W, 1, device=device)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        n = 0
        for hs in cuts:
            for ws in cuts:
                ids[:, hs, ws] = n
                n += 1
        ids = self.partition(ids).squeeze(0).squeeze(-1)  # windows, tokens
        return ids[:, :, None] == ids[:, None, :]

    def forward(self, x):
        """x: (batch, height, width, channels)."""
        B, H, W, C = x.shape
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        win = self.partition(x)
        B, nW, N, _ = win.shape
        qkv = self.qkv(win).view(B, nW, N, 3, self.num_heads, -1).permute(3, 0, 1, 4, 2, 5)
        q, k, v = qkv.unbind(0)  # batch, windows, heads, tokens, head_dim
        mask = self.region_mask(H, W, x.device)[None, :, None] if self.shift else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.transpose(2, 3).reshape(B, nW, N, C)
        out = self.merge(self.proj(out), H, W)
        if self.shift:
            out = torch.roll(out, shifts=(self.shift, self.shift), dims=(1, 2))
        return out
