# regard.check(my_softmax)
# regard.spec(causal=False)
import torch


def my_softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum(-1, keepdim=True)
