import torch

BETWEEN = "tokens"


def example():
    """2 heads, 6 tokens; each token attends to itself"""
    query = 6 * torch.randn(1, 2, 6, 4)
    return [query, query, torch.randn(1, 2, 6, 4)]


def wrong(query, key, value):  # (batch, heads, tokens, head_dim)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    output = weights @ value
    batch, heads, tokens, head_dim = output.shape
    return output.reshape(batch, tokens, heads * head_dim)


def right(query, key, value):  # (batch, heads, tokens, head_dim)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    output = weights @ value
    batch, heads, tokens, head_dim = output.shape
    return output.transpose(1, 2).reshape(batch, tokens, heads * head_dim)
