# regard.check(Attention, d_model=12)
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.W_Q = nn.Linear(d_model, d_model, bias=False)
        self.W_K = nn.Linear(d_model, d_model, bias=False)
        self.W_V = nn.Linear(d_model, d_model, bias=False)
        self.softmax = nn.Softmax(dim=0)  # <- softmax-wrong-axis

    def forward(self, X):
        Q, K, V = self.W_Q(X), self.W_K(X), self.W_V(X)
        A = self.softmax(Q @ K.transpose(1, 2) / K.size(2) ** 0.5)
        return A @ V
