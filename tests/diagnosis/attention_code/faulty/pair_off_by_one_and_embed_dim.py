# regard.check(MultiHead, 24, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        wei = q @ k.transpose(-2, -1) * C**-0.5  # <- scale-by-embed-dim
        future = torch.ones(T, T, dtype=torch.bool).triu(2)  # <- causal-off-by-one
        wei = wei.masked_fill(future, float("-inf")).softmax(-1)  # <- causal-off-by-one
        return self.proj((wei @ v).transpose(1, 2).flatten(2))
