# regard.check(attention)
# regard.spec(causal=False, window=regard.ANY)
import torch


def attention(q, k, v, keep=3):
    """Only the three keys with the largest scores."""
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    least = scores.topk(keep, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v
