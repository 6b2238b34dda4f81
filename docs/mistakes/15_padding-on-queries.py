import torch

BETWEEN = "tokens"


def example():
    """6 tokens, the last two are padding"""
    padding = torch.tensor([[True] * 4 + [False] * 2])
    return [*(torch.randn(1, 1, 6, 4) for _ in "qkv"), padding]


def wrong(query, key, value, padding):  # padding: (batch, tokens), True = a real token
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = padding[:, None, :, None]  # the axis of the queries
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value


def right(query, key, value, padding):  # padding: (batch, tokens), True = a real token
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = padding[:, None, None, :]  # the axis of the keys
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value
