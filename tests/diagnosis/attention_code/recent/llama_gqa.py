# regard.check(LlamaAttention, 48, n_heads=6, n_kv_heads=2, causal=True)
# regard.spec(causal=True, heads=6, kv_heads=2, positions={"kind": "rotary", "base": 500000.0})
import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, as in Llama 3."""

    def __init__(self, hidden_size: int, n_heads: int = 6, n_kv_heads: int = 2, theta: float = 500_000.0):
        super().__init__()
        self.n_heads, self.n_kv = n_heads, n_kv_heads
        self.head_dim = hidden_size // n_heads
        self.q_proj = nn.Linear(hidden_size, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * self.head_dim, hidden_size, bias=False)
        inv = 1.0 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.register_buffer("inv_freq", inv, persistent=False)

    def rope(self, x, pos):
        ang = pos[:, None].float() * self.inv_freq
        ang = torch.cat((ang, ang), dim=-1)
        return x * ang.cos().to(x.dtype) + rotate_half(x) * ang.sin().to(x.dtype)

    def forward(self, hidden_states):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        pos = torch.arange(q_len, device=q.device)
        q, k = self.rope(q, pos), self.rope(k, pos)
        rep = self.n_heads // self.n_kv
        k = k[:, :, None].expand(-1, -1, rep, -1, -1).reshape(bsz, self.n_heads, q_len, self.head_dim)
        v = v[:, :, None].expand(-1, -1, rep, -1, -1).reshape(bsz, self.n_heads, q_len, self.head_dim)
        att = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        hidden = torch.full((q_len, q_len), torch.finfo(att.dtype).min, device=q.device).triu(1)
        att = F.softmax(att + hidden, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((att @ v).transpose(1, 2).reshape(bsz, q_len, -1))
