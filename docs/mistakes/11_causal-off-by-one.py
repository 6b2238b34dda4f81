import torch

BETWEEN = "tokens"


def example():
    """6 tokens"""
    return [torch.randn(1, 6, 4) for _ in "qkv"]


def wrong(query, key, value):  # causal
    scores = query @ key.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    future = torch.ones(q_len, kv_len, dtype=torch.bool).triu(2)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ value


def right(query, key, value):  # causal
    scores = query @ key.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    future = torch.ones(q_len, kv_len, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ value
