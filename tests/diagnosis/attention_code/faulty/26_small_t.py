# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(query, key, value):
    scores = torch.matmul(query, key.t()) / query.size(-1) ** 0.5  # <- transpose-of-batch
    return torch.matmul(torch.softmax(scores, dim=-1), value)
