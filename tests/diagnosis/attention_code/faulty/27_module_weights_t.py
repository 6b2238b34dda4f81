# regard.check(SelfAttention, 10)
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / self.size**0.5
        attention = torch.softmax(scores, dim=2)
        return attention.transpose(1, 2) @ self.value(x)  # <- values-mixed-along-wrong-axis
