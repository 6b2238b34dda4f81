# regard.check(chunked_causal_attention, causal=True)
# regard.spec(causal=True)
import torch


def chunked_causal_attention(q, k, v, chunk: int = 4):
    """Causal attention, ``chunk`` queries at a time to save memory. q, k, v: (batch, heads, tokens, dim)"""
    kv_len = k.shape[-2]
    outputs = []
    for qc in q.split(chunk, dim=-2):
        s = qc @ k.mT * q.shape[-1] ** -0.5
        mask = torch.ones(qc.shape[-2], kv_len, dtype=torch.bool, device=q.device).tril()  # <- law influence
        outputs.append(s.masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, dim=-2)
