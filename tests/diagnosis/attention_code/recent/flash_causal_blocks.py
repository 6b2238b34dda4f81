# regard.check(causal_flash, causal=True)
# regard.spec(causal=True)
import torch


def causal_flash(q, k, v, bq: int = 2, bk: int = 2):
    """Blocks of queries and keys; blocks above the diagonal are skipped. q, k, v: (batch, heads, tokens, dim)"""
    n, scale = q.shape[-2], q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    for i in range(0, n, bq):
        qi = q[..., i : i + bq, :] * scale
        rows = torch.arange(i, min(i + bq, n), device=q.device)
        m = torch.full(qi.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros_like(qi)
        for j in range(0, min(i + bq, n), bk):
            cols = torch.arange(j, min(j + bk, n), device=q.device)
            s = qi @ k[..., j : j + bk, :].mT
            s = s.masked_fill(cols[None, :] > rows[:, None], -torch.inf)
            m2 = torch.maximum(m, s.amax(-1))
            p = (s - m2[..., None]).exp()
            r = (m - m2).exp()
            l = l * r + p.sum(-1)
            acc = acc * r[..., None] + p @ v[..., j : j + bk, :]
            m = m2
        out[..., i : i + bq, :] = acc / l[..., None]
    return out
