# regard.check(Gemma2Attention, attn_logit_softcapping=5.0, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, softcap=5.0)
import torch
from torch import nn


class Gemma2Attention(nn.Module):
    """Causal GQA with logit soft-capping: logits = cap * tanh(logits / cap)."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, attn_logit_softcapping=20.0):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.softcap = attn_logit_softcapping
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        v = v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

        logits = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
        logits = self.softcap * torch.tanh(logits / self.softcap)  # <- law influence
        weights = logits.softmax(dim=-1)
        out = torch.matmul(weights, v).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out)
