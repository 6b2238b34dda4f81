import torch

BETWEEN = "tokens"


def example():
    """8 heads, 6 tokens"""
    return [torch.randn(1, 8, 6, 4) * 2 for _ in "qkv"]


def wrong(query, key, value):  # (batch, heads, tokens, head_dim)
    embed_dim = query.shape[1] * query.shape[3]
    weights = (query @ key.mT / embed_dim ** 0.5).softmax(-1)
    return weights @ value


def right(query, key, value):  # (batch, heads, tokens, head_dim)
    head_dim = query.shape[3]
    weights = (query @ key.mT / head_dim ** 0.5).softmax(-1)
    return weights @ value
