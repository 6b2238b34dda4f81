# regard.check(multi_head_attention, num_heads=2)
# regard.spec(causal=False, heads=2)
import math

import torch


def multi_head_attention(q, k, v, num_heads):
    """q, k, v: (batch, tokens, d_model), already projected."""
    b, t, d_model = q.shape

    def heads(x):
        return x.view(b, t, num_heads, d_model // num_heads).transpose(1, 2)

    q, k, v = heads(q), heads(k), heads(v)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(d_model)  # <- scale-by-embed-dim
    out = torch.matmul(torch.softmax(scores, dim=-1), v)
    return out.transpose(1, 2).reshape(b, t, d_model)
