import torch

BETWEEN = "tokens"


def example():
    """2 samples of 6 tokens"""
    return [torch.randn(2, 6, 4) for _ in "qkv"]


def wrong(query, key, value):  # (batch, tokens, dim)
    weights = (query @ key.T / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights @ value


def right(query, key, value):  # (batch, tokens, dim)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights @ value
