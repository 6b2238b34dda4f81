# regard.check(SelfAttention(d_model=8))
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        q = self.query(x)
        k = self.key(x)
        v = self.value(x)
        attn = torch.bmm(q, k.transpose(1, 2)).softmax(-1)  # <- no-scale
        return torch.bmm(attn, v)
