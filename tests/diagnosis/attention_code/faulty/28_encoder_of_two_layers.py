# regard.check(Encoder(16, 4))  # <- no-positions
# regard.spec(causal=False, heads=4, positions=None)
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, heads, dim_feedforward=24, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)
