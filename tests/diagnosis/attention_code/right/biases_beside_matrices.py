# regard.check(Attention, 16, 4, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.d_head = d_head
        for name in "QKV":
            matrix = torch.randn(n_heads, d_model, d_head) * 0.2
            setattr(self, f"W_{name}", nn.Parameter(matrix))
            setattr(self, f"b_{name}", nn.Parameter(torch.randn(n_heads, d_head)))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        q = torch.einsum("bpd,ndh->bpnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpd,ndh->bpnh", x, self.W_K) - self.b_K
        v = torch.einsum("bpd,ndh->bpnh", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / self.d_head**0.5
        later = torch.ones(scores.shape[-2:], device=x.device).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        z = torch.einsum("bknh,bnqk->bqnh", v, weights)
        return torch.einsum("bqnh,nhd->bqd", z, self.W_O) + self.b_O
