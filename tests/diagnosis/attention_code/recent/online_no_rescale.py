# regard.check(flash_attention)
# regard.spec(causal=False)
import math
import torch


def flash_attention(q, k, v, block_size: int = 2):
    scale = 1 / math.sqrt(q.size(-1))
    out = torch.zeros_like(q)
    row_max = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype, device=q.device)
    row_sum = torch.zeros_like(row_max)
    for start in range(0, k.shape[-2], block_size):
        kj, vj = k[..., start : start + block_size, :], v[..., start : start + block_size, :]
        sij = q @ kj.transpose(-2, -1) * scale
        new_max = torch.maximum(row_max, sij.amax(dim=-1))
        pij = torch.exp(sij - new_max[..., None])
        correction = torch.exp(row_max - new_max)
        row_sum = row_sum * correction + pij.sum(-1)
        out = out + pij @ vj  # <- law mixture
        row_max = new_max
    return out / row_sum[..., None]
