# regard.check(DirectedGraphAttention, args=(torch.randn(2, 6, 24), (torch.rand(2, 6, 6) < 0.4) | torch.eye(6).bool()), means={'adj': 'True keeps'})
# regard.spec(causal=False, heads=3, positions=None, padding={"adj": "True keeps"})
import torch
import torch.nn as nn
import torch.nn.functional as F


class DirectedGraphAttention(nn.Module):
    """
    h:    (B, N, F) node features
    adj:  (B, N, N) bool. adj[b, i, j] is True if node i may attend to node j (self-loops included by the caller).
    """

    def __init__(self, feats=24, heads=3):
        super().__init__()
        self.heads = heads
        self.W = nn.Linear(feats, 3 * feats, bias=False)
        self.out = nn.Linear(feats, feats)

    def forward(self, h, adj):
        B, N, F_ = h.shape
        q, k, v = self.W(h).chunk(3, dim=-1)
        q, k, v = [t.reshape(B, N, self.heads, F_ // self.heads).transpose(1, 2) for t in (q, k, v)]
        scores = torch.einsum("bhjd,bhid->bhji", k, q) / (F_ // self.heads) ** 0.5
        scores = scores.masked_fill(~adj.unsqueeze(1), -1e9)  # <- law influence
        p = F.softmax(scores, dim=2)
        y = torch.einsum("bhji,bhjd->bhid", p, v)
        return self.out(y.transpose(1, 2).reshape(B, N, F_))
