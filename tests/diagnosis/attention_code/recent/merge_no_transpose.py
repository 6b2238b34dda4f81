# regard.check(SelfAttention, 32, 4)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class SelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.attn = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(x).tensor_split(3, dim=-1)
        q, k, v = (z.unflatten(-1, (self.n_head, -1)).movedim(2, 1) for z in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.reshape(b, t, c)  # <- heads-merged-without-transpose
        return self.proj(y)
