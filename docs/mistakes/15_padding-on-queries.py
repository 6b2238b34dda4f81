import torch

BETWEEN = "tokens"


def example():
    """6 tokens, the last two are padding"""
    real = torch.tensor([[True] * 4 + [False] * 2])
    return [*(torch.randn(1, 1, 6, 4) for _ in "qkv"), real]


def wrong(query, key, value, real):  # real: (batch, tokens), True = no padding
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = real[:, None, :, None]  # the axis of the queries
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value


def right(query, key, value, real):  # real: (batch, tokens), True = no padding
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = real[:, None, None, :]  # the axis of the keys
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value
