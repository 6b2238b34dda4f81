# regard.check(CausalSelfAttention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v)  # <- not-causal
        y = y.reshape(B, T, C)  # <- heads-merged-without-transpose
        return self.c_proj(y)
