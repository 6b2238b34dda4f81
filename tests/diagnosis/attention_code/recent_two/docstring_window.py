# regard.check(Gemma2Attention(32, 4, 2, 8, window=4), causal=True)
# regard.spec(causal=True, window=4, heads=4, kv_heads=2, positions=None, softcap=50.0)
import torch
from torch import nn


class Gemma2Attention(nn.Module):
    """Local attention: each token sees itself and the window - 1 tokens before it."""

    def __init__(self, dim, n_heads, n_kv_heads, head_dim, window=4, softcap=50.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.scaling = head_dim ** -0.5
        self.window, self.softcap = window, softcap
        self.qkv_proj = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, hidden_states):
        b, t, _ = hidden_states.shape
        q_size, kv_size = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        q, k, v = self.qkv_proj(hidden_states).split([q_size, kv_size, kv_size], dim=-1)
        q = q.view(b, t, -1, self.head_dim).transpose(1, 2) * self.scaling
        k = k.view(b, t, -1, self.head_dim).transpose(1, 2)
        v = v.view(b, t, -1, self.head_dim).transpose(1, 2)
        k = torch.repeat_interleave(k, self.n_heads // self.n_kv_heads, dim=1)
        v = torch.repeat_interleave(v, self.n_heads // self.n_kv_heads, dim=1)
        scores = q @ k.mT
        scores = torch.tanh(scores / self.softcap) * self.softcap
        pos = torch.arange(t, device=scores.device)
        dist = pos[:, None] - pos[None, :]
        allowed = (dist >= 0) & (dist < self.window)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))
