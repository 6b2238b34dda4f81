# regard.check(flash)
# regard.spec(causal=False)
import torch


def flash(q, k, v, block=2):
    """A running maximum and a running sum over blocks of keys, as flash attention does it."""
    q = q * q.shape[-1] ** -0.5
    top = torch.full((*q.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[-2], block):
        s = q @ k[..., start : start + block, :].transpose(-2, -1)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        e = (s - new_top).exp()
        shrink = (top - new_top).exp()
        total = total * shrink + e.sum(-1, keepdim=True)
        out = out * shrink + e @ v[..., start : start + block, :]
        top = new_top
    return out / total
