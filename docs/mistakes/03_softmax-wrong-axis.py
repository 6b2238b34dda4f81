import torch

BETWEEN = "tokens"


def example():
    """6 tokens"""
    return [torch.randn(1, 6, 4) for _ in "qkv"]


def wrong(query, key, value):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.softmax(dim=-2)
    return weights @ value


def right(query, key, value):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.softmax(dim=-1)
    return weights @ value
