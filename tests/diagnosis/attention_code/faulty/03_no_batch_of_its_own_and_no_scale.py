# regard.check(attention)
# regard.spec(causal=False)
from torch.nn import functional as F


def attention(q, k, v):
    scores = q @ k.mT  # <- no-scale
    return F.softmax(scores, dim=0) @ v  # <- softmax-wrong-axis
