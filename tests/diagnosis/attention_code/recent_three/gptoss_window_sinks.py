# regard.check(AttentionBlock, 32, 4, 2, axes="tokens dim", causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, sinks=True)
"""Attention with learned sinks and a sliding window, as in gpt-oss."""
import torch
from torch import nn


def sdpa(Q, K, V, S, sm_scale, sliding_window=0):
    # Q: (tokens, kv_heads, group, head_dim); K, V: (tokens, kv_heads, head_dim); S: (heads,)
    n_tokens, n_heads, q_mult, d_head = Q.shape
    K = K[:, :, None, :].expand(-1, -1, q_mult, -1)
    V = V[:, :, None, :].expand(-1, -1, q_mult, -1)
    S = S.reshape(n_heads, q_mult, 1, 1).expand(-1, -1, n_tokens, -1)
    mask = torch.triu(Q.new_full((n_tokens, n_tokens), -float("inf")), diagonal=1)
    if sliding_window > 0:
        mask += torch.tril(mask.new_full((n_tokens, n_tokens), -float("inf")), diagonal=-sliding_window)
    QK = torch.einsum("qhmd,khmd->hmqk", Q, K)
    QK *= sm_scale
    QK += mask[None, None, :, :]
    QK = torch.cat([QK, S], dim=-1)
    W = torch.softmax(QK, dim=-1)
    W = W[..., :-1]
    attn = torch.einsum("hmqk,khmd->qhmd", W, V)
    return attn.reshape(n_tokens, -1)


class AttentionBlock(nn.Module):
    """Causal, for one sequence (tokens, dim); tokens see the last sliding_window ones, themselves included."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, sliding_window=0):
        super().__init__()
        self.h, self.kv, self.d = num_heads, num_kv_heads, hidden_size // num_heads
        self.sliding_window = sliding_window
        self.sinks = nn.Parameter(torch.randn(num_heads))
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.d)
        self.out = nn.Linear(num_heads * self.d, hidden_size)

    def forward(self, x):
        qkv = self.qkv(x)
        q, k, v = qkv.split([self.h * self.d, self.kv * self.d, self.kv * self.d], dim=-1)
        q = q.view(-1, self.kv, self.h // self.kv, self.d)
        k = k.view(-1, self.kv, self.d)
        v = v.view(-1, self.kv, self.d)
        return self.out(sdpa(q, k, v, self.sinks, self.d**-0.5, self.sliding_window))
