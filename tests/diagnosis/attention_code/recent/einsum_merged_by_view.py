# regard.check(MultiHeadSelfAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn as nn


class MultiHeadSelfAttention(nn.Module):
    def __init__(self, hidden_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_dim // num_heads
        self.fc_q = nn.Linear(hidden_dim, hidden_dim)
        self.fc_k = nn.Linear(hidden_dim, hidden_dim)
        self.fc_v = nn.Linear(hidden_dim, hidden_dim)
        self.fc_o = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, src):
        n, length, hidden = src.shape
        Q = self.fc_q(src).view(n, length, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        K = self.fc_k(src).view(n, length, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        V = self.fc_v(src).view(n, length, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        energy = torch.einsum("nhqd,nhkd->nhqk", Q, K) / self.head_dim ** 0.5
        x = torch.einsum("nhqk,nhkd->nhqd", energy.softmax(-1), V)
        x = x.contiguous().view(n, length, hidden)  # <- heads-merged-without-transpose
        return self.fc_o(x)
