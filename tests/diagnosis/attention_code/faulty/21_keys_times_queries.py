# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    """The rows are the keys' here, the columns the queries'."""
    scores = k @ q.transpose(-2, -1) / q.size(-1) ** 0.5  # <- wrong-projection
    return torch.softmax(scores, dim=-1) @ v
