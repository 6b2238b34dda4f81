# regard.check(Attention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"attention_mask": "True keeps"})
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x, attention_mask=None):
        return self.mha(x, x, x, key_padding_mask=~attention_mask.bool())[0]
