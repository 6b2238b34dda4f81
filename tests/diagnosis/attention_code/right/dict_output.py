# regard.check(SelfAttention, 12)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = torch.softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=-1)
        return {"last_hidden_state": weights @ v, "attentions": weights}
