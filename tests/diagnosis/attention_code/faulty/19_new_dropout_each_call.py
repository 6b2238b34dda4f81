# regard.check(attention)
# regard.spec(causal=False)
"""A module made on the spot is always in training mode."""
import torch
from torch import nn


def attention(query, key, value):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.size(-1) ** 0.5
    weights = nn.Dropout(0.1)(scores.softmax(dim=-1))  # <- dropout-in-eval
    return torch.einsum("...qk,...kd->...qd", weights, value), weights
