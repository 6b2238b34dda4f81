# regard.check(DecoderCrossAttention(24, 3), args=(torch.randn(2, 5, 24), torch.randn(2, 8, 24)))
# regard.spec(heads=3, positions=None)
import torch
import torch.nn as nn


class DecoderCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def heads_first(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden_states, encoder_hidden_states):
        q = self.heads_first(self.q_proj(encoder_hidden_states))  # <- wrong-projection
        k = self.heads_first(self.k_proj(hidden_states))
        v = self.heads_first(self.v_proj(hidden_states))
        w = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, dim=-1)
        return self.out((w @ v).transpose(1, 2).flatten(2))
