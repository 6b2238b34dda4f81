# regard.check(attention)
# regard.spec(causal=False, heads=1)
import torch


def attention(q, k, v):
    scores = torch.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
    weights = scores.softmax(dim=-1)
    return torch.einsum("bij,bid->bjd", weights, v)  # <- values-mixed-along-wrong-axis
