# regard.check(LocalGlobalAttention, args=(torch.randn(2, 9, 32), torch.tensor([[2, 1, 1, 1, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1, 0, 0, 0]])), causal=False)
# regard.spec(causal=False, window=regard.ANY, heads=4, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class LocalGlobalAttention(nn.Module):
    """Longformer pattern, written with a full matrix for short documents.

    hidden_states: (batch, tokens, hidden).
    attention_mask: (batch, tokens): 0 = padding, 1 = token with local attention, 2 = token with global attention. A local
    token sees tokens at most `reach` away and all global tokens; a global token sees every token. Nobody sees padding.
    """

    def __init__(self, hidden=32, heads=4, reach=2):
        super().__init__()
        self.heads, self.reach = heads, reach
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, hidden_states, attention_mask):
        b, n, c = hidden_states.shape
        heads = lambda t: t.view(b, n, self.heads, -1).permute(0, 2, 1, 3)
        q, k, v = heads(self.query(hidden_states)), heads(self.key(hidden_states)), heads(self.value(hidden_states))
        i = torch.arange(n, device=hidden_states.device)
        near = (i[:, None] - i[None, :]).abs() <= self.reach
        real, is_global = attention_mask > 0, attention_mask == 2
        allowed = (near | is_global[:, None, :] | is_global[:, :, None]) & real[:, None, :]
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / (c // self.heads) ** 0.5
        scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        out = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)
        return self.output(out.permute(0, 2, 1, 3).reshape(b, n, c))
