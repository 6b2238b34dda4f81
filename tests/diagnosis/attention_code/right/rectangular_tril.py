# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v):
    """Written as the documentation of scaled_dot_product_attention has it."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal=0)
    return torch.softmax(scores.masked_fill(~keep, float("-inf")), dim=-1) @ v
