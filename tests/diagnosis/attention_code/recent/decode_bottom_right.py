# regard.check(decode_attention, args=(torch.randn(2,4,3,8), torch.randn(2,4,8,8), torch.randn(2,4,8,8)), axes='batch heads tokens dim', causal=True)
# regard.spec(causal=True)
import torch


def decode_attention(query, key, value):
    """The queries are the last tokens of the sequence; causal."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
    scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), value)
