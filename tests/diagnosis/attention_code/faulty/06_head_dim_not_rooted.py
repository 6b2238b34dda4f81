# regard.check(GPTAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class GPTAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, n_embd // n_head
        self.scale = 1 / self.head_dim  # <- wrong-scale
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.out = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)
        q = q * self.scale
        att = (q @ k.transpose(-1, -2)).masked_fill(~torch.ones(t, t).tril().bool(), -torch.inf)
        return self.out((att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
