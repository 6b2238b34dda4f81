# regard.check(WindowAttention, 24, 3, 3, args=(torch.randn(4,9,24), torch.where(torch.rand(2,9,9).tril(-1)+torch.rand(2,9,9).tril(-1).mT>.9, -100., 0.)), means={'mask': 'added to the scores'})
# regard.spec(causal=False, heads=3, positions="table", padding={"mask": "added to the scores"})
import torch
import torch.nn as nn


class WindowAttention(nn.Module):
    """Swin window attention with a relative position bias.

    x: (windows * batch, size * size, dim); mask: (windows, N, N), 0 or -100, added.
    """

    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        s = window_size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * s - 1) ** 2, num_heads) * 0.5)
        grid = torch.stack(torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")).flatten(1)
        rel = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + s - 1
        self.register_buffer("relative_position_index", rel[..., 0] * (2 * s - 1) + rel[..., 1])
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))
