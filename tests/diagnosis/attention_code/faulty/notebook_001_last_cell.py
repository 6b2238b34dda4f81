# regard.check(scores_of)
# regard.spec(causal=False, heads=1, positions=None)
"""The second notebook's last cell, made a function: three words, keys of three numbers."""
import torch

w_key = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
w_query = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
w_value = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])


def scores_of(v):
    keys = v @ w_key
    queries = v @ w_query
    values = v @ w_value
    return torch.softmax(queries @ keys / 3**0.5, dim=-1) @ values  # <- keys-not-transposed
