# regard.check(varlen_attention, args=(torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.tensor([0, 4, 6, 9])), causal=False, axes="tokens heads dim")
# regard.spec(causal=False, documents=("cu_seqlens",))
import torch


def varlen_attention(q, k, v, cu_seqlens):
    """q, k, v: (total tokens, heads, head_dim); every sequence attends to itself."""
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:]):
        qs = q[start:end].transpose(0, 1)
        ks, vs = (t[start:end - 1].transpose(0, 1) for t in (k, v))  # <- law influence
        w = (qs @ ks.mT * q.shape[-1] ** -0.5).softmax(-1)
        out[start:end] = (w @ vs).transpose(0, 1)
    return out
