# regard.check(flash_forward)
# regard.spec(causal=False)
import math
import torch


def flash_forward(q, k, v, block: int = 3):
    """Attention one block of keys at a time, with a running maximum (FlashAttention 2)."""
    scale = 1 / math.sqrt(q.shape[-1])
    m = q.new_full(q.shape[:-1] + (1,), -math.inf)
    l = torch.zeros_like(m)
    acc = q.new_zeros(q.shape[:-1] + v.shape[-1:])
    for kb, vb in zip(k.split(block, dim=-2), v.split(block, dim=-2)):
        s = q @ kb.transpose(-1, -2) * scale
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = torch.exp(s - m_new)
        alpha = torch.exp(m - m_new)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ vb
        m = m_new
    return acc / l
