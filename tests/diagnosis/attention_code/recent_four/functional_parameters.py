# regard.check(mha, args=(torch.randn(2, 6, 16), {'w': torch.randn(16, 48) / 4, 'b': torch.randn(48)}, {'w': torch.randn(16, 16) / 4, 'b': torch.randn(16)}, 2))
# regard.spec(causal=True, heads=2, positions=None)
"""picoGPT spirit, but on torch tensors: parameters live in dicts, functions are pure."""
import torch


def linear(x, w, b):
    return x @ w + b


def softmax(x):
    e = torch.exp(x - torch.amax(x, -1, keepdim=True))
    return e / torch.sum(e, -1, keepdim=True)


def attention(q, k, v, mask):  # [n_q, d_k], [n_k, d_k], [n_k, d_v], [n_q, n_k] -> [n_q, d_v]
    """mask holds 0 where a query may look and -1e10 where not; it is added."""
    return softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask) @ v


def mha(x, c_attn, c_proj, n_head):  # [n_seq, n_embd] -> [n_seq, n_embd]
    x = linear(x, **c_attn)
    qkv_heads = [torch.chunk(part, n_head, dim=-1) for part in torch.chunk(x, 3, dim=-1)]
    causal_mask = (1 - torch.tril(torch.ones(x.shape[-2], x.shape[-2]))) * -1e10
    out_heads = [attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads)]
    return linear(torch.cat(out_heads, dim=-1), **c_proj)
