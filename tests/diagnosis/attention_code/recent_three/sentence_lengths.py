# regard.check(MaskedSelfAttention, 32, args=(torch.randn(3, 6, 32), torch.tensor([6, 4, 2])), causal=False)
# regard.spec(causal=False, heads=4, positions=None, padding={"lengths": "lengths"})
"""Self-attention over sentences of different lengths."""
import torch
import torch.nn as nn


class MaskedSelfAttention(nn.Module):
    def __init__(self, hidden_dim, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(hidden_dim, hidden_dim)
        self.key = nn.Linear(hidden_dim, hidden_dim)
        self.value = nn.Linear(hidden_dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x, lengths):
        """
        x: (batch, max_len, hidden_dim), padded at the end
        lengths: (batch,), the number of real tokens of each sentence
        Outputs at padded places are zero.
        """
        batch, max_len, dim = x.shape
        valid = torch.arange(max_len, device=x.device)[None, :] < lengths[:, None]

        def heads(t):
            return t.reshape(batch, max_len, self.n_heads, -1).permute(0, 2, 1, 3)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        energy = torch.einsum("bhid,bhjd->bhij", q, k) / (q.shape[-1] ** 0.5)
        energy = energy.masked_fill(~valid[:, None, None, :], torch.finfo(energy.dtype).min)
        weights = torch.softmax(energy, dim=-1)
        ctx = torch.einsum("bhij,bhjd->bhid", weights, v).permute(0, 2, 1, 3).reshape(batch, max_len, dim)
        return self.out(ctx) * valid.unsqueeze(-1)
