# regard.check(MultiHead, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    """labml keeps (seq, batch, heads, dim); here batch comes first, and dim=1 is the heads."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.softmax = nn.Softmax(dim=1)  # <- softmax-wrong-axis

    def split(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.heads, self.d_k).permute(0, 2, 1, 3)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / self.d_k**0.5
        attn = self.softmax(scores)
        out = torch.einsum("bhij,bhjd->bihd", attn, v)
        return self.output(out.flatten(2))
