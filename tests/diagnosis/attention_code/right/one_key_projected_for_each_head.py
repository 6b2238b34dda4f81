# regard.check(MultiQuery(24, 3))
# regard.spec(causal=False, heads=3, kv_heads=1, positions=None)
"""All heads share a key and a value, which the loop works out for each anew."""
import torch
from torch import nn


class MultiQuery(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(d, d // h) for _ in range(h))
        self.key, self.value = nn.Linear(d, d // h), nn.Linear(d, d // h)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        outputs = []
        for query in self.queries:
            q, k, v = query(x), self.key(x), self.value(x)
            weights = (q @ k.transpose(1, 2) / q.size(-1) ** 0.5).softmax(-1)
            outputs.append(weights @ v)
        return self.out(torch.cat(outputs, dim=-1))
