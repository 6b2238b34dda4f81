# regard.check(Tagger)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        weights = (self.to_q(x) @ self.to_k(x).mT / x.shape[-1] ** 0.5).softmax(-1)
        return weights @ self.to_v(x)


class Tagger(nn.Module):
    """The first layer is pretrained and stays frozen."""

    def __init__(self, words=20, width=32):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.frozen, self.trained = Attention(width), Attention(width)
        self.tags = nn.Linear(width, 5)

    def forward(self, ids):
        x = self.table(ids)
        with torch.no_grad():
            x = x + self.frozen(x)
        return self.tags(x + self.trained(x))
