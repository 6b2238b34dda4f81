# regard.check(T5Attention, 24, 3)
# regard.spec(causal=False, heads=3, scale=1.0, positions="table")
import math
import torch
from torch import nn


class T5Attention(nn.Module):
    def __init__(self, d_model, num_heads, num_buckets=8, max_distance=20, is_decoder=False):
        super().__init__()
        self.is_decoder = is_decoder
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.n_heads, self.d_kv = num_heads, d_model // num_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _bucket(self, relative_position):
        buckets, n = 0, self.num_buckets
        if not self.is_decoder:
            n //= 2
            buckets = (relative_position > 0).long() * n
            relative_position = relative_position.abs()
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = n // 2
        is_small = relative_position < max_exact
        large = max_exact + (torch.log(relative_position.float().clamp(min=1) / max_exact)
                             / math.log(self.max_distance / max_exact) * (n - max_exact)).long()
        large = torch.min(large, torch.full_like(large, n - 1))
        return buckets + torch.where(is_small, relative_position, large)

    def compute_bias(self, q_len, k_len):
        context = torch.arange(q_len)[:, None]
        memory = torch.arange(k_len)[None, :]
        values = self.relative_attention_bias(self._bucket(memory - context))
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden_states):
        b, t, _ = hidden_states.shape
        def shape(states):
            return states.view(b, -1, self.n_heads, self.d_kv).transpose(1, 2)
        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.compute_bias(t, t)
        attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        out = torch.matmul(attn_weights, v).transpose(1, 2).contiguous().view(b, -1, self.n_heads * self.d_kv)
        return self.o(out)
