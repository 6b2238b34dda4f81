# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(q, k, v):
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    weights = (q @ k.transpose(-2, -1)).softmax(-1, dtype=torch.float32)  # <- no-scale
    return (weights.to(v.dtype) @ v).float()
