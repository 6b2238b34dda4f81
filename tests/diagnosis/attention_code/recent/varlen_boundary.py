# regard.check(varlen_attn, args=(torch.randn(9,2,8), torch.randn(9,2,8), torch.randn(9,2,8), torch.tensor([0,4,9],dtype=torch.int32)), axes='tokens heads dim', causal=True)
# regard.spec(causal=True, documents=("cu_seqlens",))
import torch
import torch.nn.functional as F


def varlen_attn(q, k, v, cu_seqlens):
    """Packed causal attention: q, k, v (total, heads, dim); cu_seqlens (sequences + 1,), starts with 0."""
    idx = torch.arange(q.shape[0], device=q.device)
    doc = torch.bucketize(idx, cu_seqlens.to(idx.dtype))  # <- law influence
    mask = (doc[:, None] == doc[None, :]) & (idx[:, None] >= idx[None, :])
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
