# regard.check(scaled_dot_attention, args=(torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8), (torch.arange(6) < torch.tensor([[6], [4]]))[:, None, None].float()))
# regard.spec(causal=False, padding={"mask": "True keeps"})
import math
import torch


def scaled_dot_attention(query, key, value, mask=None, dropout=None):
    """Compute attention for the assignment.

    query, key, value: (batch, heads, length, d_k)
    mask: (batch, 1, 1, length), 1 = real token, 0 = padding
    """
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    p_attn = torch.softmax(scores, dim=-1)
    if mask is not None:
        p_attn = torch.softmax(scores.masked_fill(mask == 0, -1e9), dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn
