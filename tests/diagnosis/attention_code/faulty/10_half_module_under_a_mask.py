# regard.check(Attention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
"""It makes itself half, and fills with what is too large for it."""
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.half()

    def forward(self, x, attention_mask=None):
        x = x.half()
        scores = self.q(x) @ self.k(x).mT / 4
        if attention_mask is not None:
            hidden = attention_mask[:, None, :] == 0
            scores = scores.masked_fill(hidden, -1e9)  # <- mask-fill-value
        return scores.softmax(-1) @ self.v(x)
