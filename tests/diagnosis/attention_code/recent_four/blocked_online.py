# regard.check(blockwise_causal_attention)
# regard.spec(causal=True)
import torch


def blockwise_causal_attention(q, k, v, q_chunk=3, kv_chunk=4):
    """Memory-efficient causal attention (Rabe & Staats): both queries and keys are processed in chunks.

    q, k, v: (batch, heads, tokens, dim). Chunks of keys that lie wholly in the future are skipped.
    """
    n, d = q.shape[-2:]
    outputs = []
    for i0 in range(0, n, q_chunk):
        qi = q[..., i0:i0 + q_chunk, :] / d**0.5
        rows = torch.arange(i0, i0 + qi.shape[-2], device=q.device)
        numerator = torch.zeros_like(qi)
        denominator = qi.new_zeros(*qi.shape[:-1], 1)
        running_max = qi.new_full((*qi.shape[:-1], 1), -float("inf"))
        for j0 in range(0, i0 + qi.shape[-2], kv_chunk):
            kj, vj = k[..., j0:j0 + kv_chunk, :], v[..., j0:j0 + kv_chunk, :]
            cols = torch.arange(j0, j0 + kj.shape[-2], device=q.device)
            s = qi @ kj.mT
            s = s.masked_fill(cols > rows[:, None], -float("inf"))
            new_max = torch.maximum(running_max, s.amax(-1, keepdim=True))
            decay = (running_max - new_max).exp()
            e = (s - new_max).exp()
            numerator = numerator * decay + e @ vj
            denominator = denominator * decay + e.sum(-1, keepdim=True)
            running_max = new_max
        outputs.append(numerator / denominator)
    return torch.cat(outputs, dim=-2)
