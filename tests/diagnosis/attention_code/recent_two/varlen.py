# regard.check(varlen_attention, args=(torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.tensor([0, 4, 6, 9])), causal=True, axes="tokens heads dim")
# regard.spec(causal=True, documents=("cu_seqlens",))
import torch


def varlen_attention(q, k, v, cu_seqlens):
    """q, k, v: (total tokens, heads, head_dim); causal inside each sequence."""
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:]):
        qs, ks, vs = (t[start:end].transpose(0, 1) for t in (q, k, v))
        s = qs @ ks.transpose(-2, -1) * q.shape[-1] ** -0.5
        n = end - start
        s = s + torch.full((n, n), float("-inf")).triu(1)
        out[start:end] = (s.softmax(-1) @ vs).transpose(0, 1)
    return out
