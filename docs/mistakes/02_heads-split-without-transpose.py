import torch

BETWEEN = "tokens"


def example():
    """2 heads of 4 columns, 6 tokens; each token attends to itself"""
    query = 6 * torch.randn(1, 6, 8)
    return [query, query, torch.randn(1, 6, 8)]


def wrong(query, key, value, heads=2):  # (batch, tokens, heads * head_dim)
    batch, tokens, width = query.shape
    query, key, value = (
        x.view(batch, heads, tokens, width // heads)
        for x in (query, key, value)
    )
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(batch, tokens, width)


def right(query, key, value, heads=2):  # (batch, tokens, heads * head_dim)
    batch, tokens, width = query.shape
    query, key, value = (
        x.view(batch, tokens, heads, width // heads).transpose(1, 2)
        for x in (query, key, value)
    )
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(batch, tokens, width)
