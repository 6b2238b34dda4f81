# regard.check(grouped_attention)
# regard.spec(causal=False, kv_heads=regard.ANY)
import torch


def grouped_attention(q, k, v):
    """q: (batch, heads, tokens, dim); k, v: (batch, kv_heads, tokens, dim), fewer heads."""
    times = q.size(1) // k.size(1)
    k = torch.cat([k] * times, dim=1)  # <- kv-heads-repeated-in-wrong-order
    v = torch.cat([v] * times, dim=1)  # <- kv-heads-repeated-in-wrong-order
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return torch.softmax(scores, dim=-1) @ v
