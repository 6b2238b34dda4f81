# regard.check(attention)
from torch.nn import functional as F


def attention(q, k, v):
    scores = q @ k.mT  # <- no-scale
    return F.softmax(scores, dim=0) @ v  # <- softmax-wrong-axis
