# regard.check(T5Attention, 24, n_heads=3)
# regard.spec(causal=False, heads=3, scale=1.0, positions="table")
import torch
import torch.nn as nn


class T5Attention(nn.Module):
    """Encoder self-attention of T5: no scale, a learned bias for each clipped distance."""

    def __init__(self, d_model, n_heads=3, max_distance=8):
        super().__init__()
        self.n_heads, self.max_distance = n_heads, max_distance
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(2 * max_distance + 1, n_heads)

    def position_bias(self, n, device):
        i = torch.arange(n, device=device)
        distance = (i[None, :] - i[:, None]).clamp(-self.max_distance, self.max_distance)
        return self.relative_attention_bias(distance + self.max_distance).permute(2, 0, 1)

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        shape = lambda t: t.view(b, n, self.n_heads, -1).transpose(1, 2)
        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = q @ k.transpose(3, 2) + self.position_bias(n, q.device)
        attn = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((attn @ v).transpose(1, 2).reshape(b, n, -1))
