import torch

BETWEEN = "tokens"


def example():
    """6 tokens, a causal mask"""
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return [*(torch.randn(1, 6, 4) for _ in "qkv"), mask]


def wrong(query, key, value, mask):  # mask: True = may attend
    scores = query @ key.mT / query.shape[-1] ** 0.5
    causal = mask & torch.ones_like(mask).tril()  # never used
    return scores.softmax(dim=-1) @ value


def right(query, key, value, mask):  # mask: True = may attend
    scores = query @ key.mT / query.shape[-1] ** 0.5
    causal = mask & torch.ones_like(mask).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    return scores.softmax(dim=-1) @ value
