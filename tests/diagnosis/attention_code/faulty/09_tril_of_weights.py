# regard.check(causal_attention, causal=True)
# regard.spec(causal=True)
import math

import torch


def causal_attention(Q, K, V):
    S = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])
    P = torch.tril(torch.softmax(S, dim=-1))  # <- mask-after-softmax
    return P @ V
