# regard.check(masked_attention)
# regard.spec(causal=False, heads=1, padding={"lengths": "lengths"})
import torch


def masked_attention(q, k, v, lengths):
    steps = torch.arange(q.size(1))
    outside = steps[None, :, None] >= lengths[:, None, None]  # <- padding-on-queries
    scores = torch.bmm(q, k.transpose(1, 2)) / q.size(2) ** 0.5
    scores = scores.masked_fill(outside, -1e9)
    return torch.bmm(scores.softmax(dim=2), v)
