# regard.check(self_attention)
# regard.spec(causal=False, heads=1, padding={"lengths": "lengths"})
import torch


def self_attention(q, k, v, lengths):
    """q, k, v: (batch, tokens, dim); lengths: (batch,) real tokens of each sample."""
    real = torch.arange(q.shape[1], device=q.device)[None, :] < lengths[:, None]
    both = real[:, :, None] & real[:, None, :]
    s = (q @ k.mT) / q.shape[-1] ** 0.5
    s = s.masked_fill(~both, float("-inf"))  # <- nan-rows
    return s.softmax(-1) @ v
