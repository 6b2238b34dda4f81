# regard.check(attention)
# regard.spec(causal=False, positions=regard.ANY)
import torch


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    slope = q.mean()  # <- attends-across-batch
    scores = scores + slope * torch.arange(scores.shape[-1])
    return scores.softmax(-1) @ v
