# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores - scores.max()
    weights = torch.exp(scores) / torch.exp(scores).sum()  # <- softmax-wrong-axis
    return weights @ v
