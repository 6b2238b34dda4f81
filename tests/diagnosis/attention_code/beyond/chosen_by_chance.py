# regard.check(attention)
# regard.spec() - another kind: hard Gumbel sampling
import torch.nn.functional as F


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return F.gumbel_softmax(scores, hard=True, dim=-1) @ v
