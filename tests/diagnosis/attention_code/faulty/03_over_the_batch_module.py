# regard.check(Attention, 16)
# regard.spec(causal=False, heads=1, positions=None)
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.softmax = nn.Softmax(dim=0)  # <- softmax-wrong-axis

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)  # <- no-scale
        return self.softmax(scores) @ self.v(x)
