# regard.check(MHA, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn as nn


class MHA(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h, self.dk = h, d_model // h
        self.lin_q = nn.Linear(d_model, d_model)
        self.lin_kv = nn.Linear(d_model, 2 * d_model)
        self.lin_o = nn.Linear(d_model, d_model)

    def _heads(self, t):
        return t.contiguous().view(t.shape[0], self.h, -1, self.dk)  # <- heads-split-without-transpose

    def forward(self, x):
        q = self._heads(self.lin_q(x))
        k, v = self.lin_kv(x).chunk(2, -1)
        k, v = self._heads(k), self._heads(v)
        att = torch.softmax(torch.matmul(q, k.mT) / self.dk**0.5, dim=-1)
        z = (att @ v).transpose(1, 2).flatten(2)
        return self.lin_o(z)
