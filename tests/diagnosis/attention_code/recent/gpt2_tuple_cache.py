# regard.check(GPT2Attention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
from torch import nn


class GPT2Attention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.c_attn = nn.Linear(embed_dim, 3 * embed_dim)
        self.c_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, layer_past=None, use_cache=True):
        b, n, c = hidden_states.shape
        q, k, v = (
            t.view(b, n, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
            for t in self.c_attn(hidden_states).split(c, dim=2)
        )
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=-2)
            v = torch.cat((layer_past[1], v), dim=-2)
        present = (k, v) if use_cache else None
        total = k.size(-2)
        w = (q @ k.transpose(-1, -2)) / self.head_dim**0.5
        causal = torch.ones(total, total, dtype=torch.bool, device=w.device).tril()[total - n : total]
        w = torch.where(causal, w, torch.finfo(w.dtype).min)
        out = w.softmax(-1) @ v
        return self.c_proj(out.permute(0, 2, 1, 3).reshape(b, n, c)), present
