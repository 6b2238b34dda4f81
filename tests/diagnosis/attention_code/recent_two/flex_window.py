# regard.check(FlexAttention(32, 4, window=3))
# regard.spec(causal=True, window=4, heads=4, positions=None)
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class FlexAttention(nn.Module):
    """Each token attends to itself and to the `window` tokens before it."""

    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)

        def mask_mod(b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) & (q_idx - kv_idx <= self.window)

        block_mask = create_block_mask(mask_mod, None, None, t, t, device=x.device)
        y = flex_attention(q, k, v, block_mask=block_mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))
