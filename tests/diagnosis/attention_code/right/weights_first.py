# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(Q, K, V):
    """Returns (weights, output), in this order."""
    alpha = torch.softmax(Q @ K.transpose(-2, -1) / K.shape[-1] ** 0.5, dim=-1)
    return alpha, alpha @ V
