# regard.check(ShiftedWindowMSA, 32, 4, args=(torch.randn(2, 8, 8, 32),), causal=False)
"""Window attention on feature maps (Swin), windows of the batch in one axis (2021)."""
import torch
import torch.nn as nn


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size * window_size, C)


def window_reverse(windows, window_size, H, W):
    nW = (H // window_size) * (W // window_size)
    B = windows.shape[0] // nW
    x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class ShiftedWindowMSA(nn.Module):
    def __init__(self, dim, num_heads, window_size=4, shift_size=2):
        super().__init__()
        self.num_heads = num_heads
        self.window_size, self.shift_size = window_size, shift_size
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def attn_mask(self, H, W, device):
        img = torch.zeros((1, H, W, 1), device=device)
        slices = (
            slice(0, -self.window_size),
            slice(-self.window_size, -self.shift_size),
            slice(-self.shift_size, None),
        )
        cnt = 0
        for h in slices:
            for w in slices:
                img[:, h, w, :] = cnt
                cnt += 1
        win = window_partition(img, self.window_size).squeeze(-1)
        diff = win.unsqueeze(1) - win.unsqueeze(2)
        return torch.zeros_like(diff).masked_fill(diff != 0, -100.0)

    def forward(self, x):
        """x: (B, H, W, C)"""
        B, H, W, C = x.shape
        shifted = torch.roll(x, (-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = window_partition(shifted, self.window_size)
        B_, N, _ = windows.shape
        qkv = self.qkv(windows).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        mask = self.attn_mask(H, W, x.device)
        nW = mask.shape[0]
        attn = attn.view(nW, B_ // nW, self.num_heads, N, N) + mask[:, None, None]  # <- attends-across-batch
        attn = attn.view(B_, self.num_heads, N, N).softmax(dim=-1)
        out = self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))
        out = window_reverse(out, self.window_size, H, W)
        return torch.roll(out, (self.shift_size, self.shift_size), dims=(1, 2))
