# regard.check(CausalLMAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class CausalLMAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        """attention_mask: (batch, tokens), 1 = word, 0 = padding (left or right)"""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
