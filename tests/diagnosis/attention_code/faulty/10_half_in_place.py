# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""float16 ends at 65504, in place too."""
import torch


def attention(q, k, v):
    mask = torch.ones(q.shape[-2], k.shape[-2]).tril()
    s = (q @ k.mT / q.shape[-1] ** 0.5).half()
    s.masked_fill_(mask == 0, -1e9)  # <- mask-fill-value
    return s.float().softmax(-1) @ v
