# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    """For float16 inputs: the scores and their softmax in float32, the result as it came."""
    scores = q.float() @ k.float().transpose(-1, -2)
    weights = torch.softmax(scores / q.size(-1) ** 0.5, dim=-1)
    return (weights @ v.float()).to(q.dtype)
