# regard.check(my_softmax)
# regard.spec(causal=False)
import torch


def my_softmax(scores):
    e = torch.exp(scores - scores.max())
    return e / e.sum(-1)  # <- softmax-wrong-axis
