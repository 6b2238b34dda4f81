# regard.check(window_flash, causal=True)
# regard.spec(causal=True, window=3)
import torch


def window_flash(q, k, v, window: int = 3, block: int = 2):
    """Causal sliding window of 3 keys, blockwise softmax. q, k, v: (batch, heads, tokens, dim)"""
    n = q.shape[-2]
    rows = torch.arange(n, device=q.device)[:, None]
    m = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    for j in range(0, n, block):
        cols = torch.arange(j, min(j + block, n), device=q.device)[None, :]
        s = q @ k[..., j : j + block, :].mT * q.shape[-1] ** -0.5
        s = s.masked_fill((cols > rows) | (cols <= rows - window), -torch.inf)
        m2 = torch.maximum(m, s.amax(-1))
        p = (s - m2[..., None]).exp()  # <- law runs
        r = (m - m2).exp()
        l, acc, m = l * r + p.sum(-1), acc * r[..., None] + p @ v[..., j : j + block, :], m2
    return acc / l[..., None]
