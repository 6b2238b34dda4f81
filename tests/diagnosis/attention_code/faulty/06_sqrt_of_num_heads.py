# regard.check(MultiHeadAttention, 40, 5)
# regard.spec(causal=False, heads=5, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.scale = num_heads**-0.5  # <- wrong-scale
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        bsz, seq, hidden = x.shape
        q = self.q_proj(x).view(bsz, seq, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, seq, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, seq, self.num_heads, self.head_dim).transpose(1, 2)
        logits = torch.matmul(q, k.transpose(2, 3)) * self.scale
        out = torch.matmul(F.softmax(logits, dim=-1), v)
        return self.o_proj(out.transpose(1, 2).contiguous().view(bsz, seq, hidden))
