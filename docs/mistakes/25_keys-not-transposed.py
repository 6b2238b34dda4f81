import torch

BETWEEN = "tokens"


def example():
    """6 tokens, 6 columns"""
    return [torch.randn(1, 6, 6) for _ in "qkv"]


def wrong(query, key, value):  # as many tokens as columns
    weights = (query @ key / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights @ value


def right(query, key, value):
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
    return weights @ value
