# regard.check(varlen_attention, args=(torch.randn(9,2,8), torch.randn(9,2,8), torch.randn(9,2,8), torch.tensor([0,4,9],dtype=torch.int32)), axes='tokens heads dim', causal=True)
# regard.spec(causal=True, documents=("cu_seqlens",))
import torch


def varlen_attention(q, k, v, cu_seqlens):
    """Causal attention of packed sequences.

    q, k, v: (total_tokens, heads, head_dim); cu_seqlens: (sequences + 1,) int32, starts with 0.
    """
    total = q.shape[0]
    pos = torch.arange(total, device=q.device)
    doc = torch.searchsorted(cu_seqlens.long(), pos, right=True)
    ok = (doc[:, None] == doc[None, :]) & (pos[:, None] >= pos[None, :])
    s = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    s = s.masked_fill(~ok, float("-inf"))
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
