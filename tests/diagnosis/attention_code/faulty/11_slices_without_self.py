# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch


def attention(q, k, v):
    out = []
    for i in range(q.shape[-2]):
        past = slice(0, max(i, 1))
        scores = (k[..., past, :] @ q[..., i, :, None]).squeeze(-1) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1)  # <- causal-off-by-one
        out.append((weights[..., None] * v[..., past, :]).sum(-2))
    return torch.stack(out, -2)
