# regard.check(GroupedQueryAttention, 32, 4, 2, args=(torch.randn(2, 6, 32), *cos_sin(6, 8)), causal=True)
"""Decoder attention with rotary tables given by the model (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def apply_rope(x, cos, sin):
    """x: (batch, heads, tokens, head_dim); cos, sin: (tokens, head_dim)"""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class GroupedQueryAttention(nn.Module):
    def __init__(self, d_in, num_heads, num_kv_groups):
        super().__init__()
        assert num_heads % num_kv_groups == 0
        self.num_heads = num_heads
        self.num_kv_groups = num_kv_groups
        self.group_size = num_heads // num_kv_groups
        self.head_dim = d_in // num_heads
        self.W_query = nn.Linear(d_in, num_heads * self.head_dim, bias=False)
        self.W_key = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=False)
        self.W_value = nn.Linear(d_in, num_kv_groups * self.head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * self.head_dim, d_in, bias=False)

    def forward(self, x, cos, sin):
        b, num_tokens, _ = x.shape
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.W_key(x).view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)
        queries = apply_rope(queries, cos, sin)
        keys = apply_rope(keys, cos, sin)
        keys = keys.repeat_interleave(self.group_size, dim=1)
        values = values.repeat_interleave(self.group_size, dim=1)
        context = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        context = context.reshape(b, num_tokens, self.num_heads * self.head_dim)  # <- heads-merged-without-transpose
        return self.out_proj(context)


def cos_sin(tokens, dim):
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
