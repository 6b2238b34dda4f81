# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v):
    """No mask: each query is given the keys up to its own."""
    out = []
    for i in range(q.shape[-2]):
        scores = (k[..., : i + 1, :] @ q[..., i, :, None]).squeeze(-1) / q.shape[-1] ** 0.5
        out.append((scores.softmax(-1)[..., None] * v[..., : i + 1, :]).sum(-2))
    return torch.stack(out, -2)
