import torch

BETWEEN = "tokens"


def example():
    """2 samples of 6 tokens, 3 of the second are padding"""
    real = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    return [*(torch.randn(2, 1, 6, 4) for _ in "qkv"), real]


def wrong(query, key, value, real):  # real: (batch, tokens), True = no padding
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = real[0]  # the first sample, for all of them
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value


def right(query, key, value, real):  # real: (batch, tokens), True = no padding
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, heads, tokens, tokens)
    mask = real[:, None, None, :]
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value
