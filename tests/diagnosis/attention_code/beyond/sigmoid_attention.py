# regard.check(attention)
# regard.spec() - another kind: sigmoid attention
import torch


def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return torch.sigmoid(scores - torch.tensor(float(k.size(-2))).log()) @ v
