# regard.check(FlexCausal(32, 4), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal(b, h, q_idx, kv_idx):
    return kv_idx >= q_idx  # <- mask-inverted


class FlexCausal(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, t, t, device=x.device))
        return self.out(y.transpose(1, 2).reshape(b, t, d))
