# regard.check(MultiHeadAttention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.W_q(x)), self.heads(self.W_k(x)), self.heads(self.W_v(x))
        sims = q @ v.transpose(-1, -2) / self.head_dim**0.5  # <- wrong-projection
        out = torch.softmax(sims, dim=-1) @ v
        return self.W_o(out.transpose(1, 2).flatten(2))
