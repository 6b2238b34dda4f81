# regard.check(Encoder, 12)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        """attention_mask: (batch, tokens), 1 for a token and 0 for padding"""
        scores = torch.einsum("bid,bjd->bij", self.query(x), self.key(x)) / x.size(-1) ** 0.5
        probs = scores.softmax(dim=2)
        probs = probs * attention_mask[:, None, :]  # <- mask-after-softmax
        return torch.einsum("bij,bjd->bid", probs, self.value(x))
