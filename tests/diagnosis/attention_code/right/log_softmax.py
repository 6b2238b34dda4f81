# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    log_weights = torch.log_softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=-1)
    return log_weights.exp() @ v
