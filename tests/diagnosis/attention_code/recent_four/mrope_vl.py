# regard.check(VisionLanguageAttention, args=(torch.randn(4, 7, 32), torch.tensor([[[0, 1, 1, 1, 1, 3, 4]] * 4, [[0, 1, 1, 2, 2, 3, 4]] * 4, [[0, 1, 2, 1, 2, 3, 4]] * 4])), causal=True)
# regard.spec(causal=True, heads=2, positions={"kind":"rotary","base":1000.0,"pairing":"halves"})
import torch
from torch import nn


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)


def select(table, sections):
    """table: (3, batch, tokens, head_dim), for time, height and width. The first sections[0] pairs turn with time, the
    next sections[1] with height, the last sections[2] with width."""
    parts = table.split(list(sections) * 2, dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


class VisionLanguageAttention(nn.Module):
    """Causal attention of a vision-language decoder with multimodal rotary positions.

    hidden_states: (batch, tokens, dim). position_ids: (3, batch, tokens), the time, height and width of each token;
    they are equal for text.
    """

    def __init__(self, dim=32, heads=2, sections=(2, 3, 3), theta=1000.0):
        super().__init__()
        self.heads, self.sections = heads, sections
        d = dim // heads
        self.register_buffer("inv_freq", theta ** (-torch.arange(0, d, 2) / d), persistent=False)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden_states, position_ids):
        b, n, c = hidden_states.shape
        q, k, v = (p(hidden_states).view(b, n, self.heads, -1).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        freqs = position_ids[..., None] * self.inv_freq
        angles = torch.cat((freqs, freqs), dim=-1)
        cos, sin = select(angles.cos(), self.sections)[:, None], select(angles.sin(), self.sections)[:, None]
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        scores = q @ k.transpose(2, 3) / (c // self.heads) ** 0.5
        scores = scores + torch.full((n, n), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        return self.o_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))
