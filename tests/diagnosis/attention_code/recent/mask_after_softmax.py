# regard.check(CausalHead, 16, head_size=8, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
import torch.nn as nn


class CausalHead(nn.Module):
    """One head, as in the lecture."""

    def __init__(self, n_embd, head_size=8, block_size=64):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = (q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).softmax(dim=-1)
        wei = wei * self.tril[:T, :T]  # <- mask-after-softmax
        return wei @ v
