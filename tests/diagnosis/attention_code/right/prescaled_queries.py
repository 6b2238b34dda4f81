# regard.check(SelfAttention, 20, 5)
# regard.spec(causal=False, heads=5, positions=None)
"""The query is scaled before the product (fairseq and BART do it so)."""
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def shape(self, t, bsz, length):
        t = t.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2).contiguous()
        return t.view(bsz * self.num_heads, length, self.head_dim)

    def forward(self, hidden_states):
        bsz, length, _ = hidden_states.size()
        q = self.shape(self.q_proj(hidden_states) * self.scaling, bsz, length)
        k = self.shape(self.k_proj(hidden_states), bsz, length)
        v = self.shape(self.v_proj(hidden_states), bsz, length)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        out = torch.bmm(weights, v)
        out = out.view(bsz, self.num_heads, length, self.head_dim).transpose(1, 2)
        return self.out_proj(out.reshape(bsz, length, self.embed_dim))
