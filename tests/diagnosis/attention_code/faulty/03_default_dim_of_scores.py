# regard.check(weights_of)
# regard.spec(causal=False)
import torch.nn.functional as F


def weights_of(scores):
    """scores: (queries, keys) -> weights of the same shape"""
    return F.softmax(scores, dim=0)  # <- softmax-wrong-axis
