import torch

BETWEEN = "tokens"


def example():
    """6 tokens, 64 columns"""
    return [torch.randn(1, 6, 64) for _ in "qkv"]


def wrong(query, key, value):
    weights = (query @ key.mT).softmax(dim=-1)
    return weights @ value


def right(query, key, value):
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights @ value
