# regard.check(Attention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, attention_mask=None):
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / x.size(-1) ** 0.5
        if attention_mask is None:
            attention_mask = torch.ones(x.shape[:2])
            scores = scores.masked_fill(attention_mask[:, None] == 0, -1e9)
        return torch.bmm(torch.softmax(scores, dim=-1), self.v(x))  # <- mask-unused
