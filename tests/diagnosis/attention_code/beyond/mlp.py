# regard.check(MLP(16))
# regard.spec() - another kind: an MLP
from torch import nn


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return self.layers(x)
