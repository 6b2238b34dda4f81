import torch

BETWEEN = "tokens"


def example():
    """6 tokens, a causal mask, the first two are padding"""
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[:, :2] = False
    return [*(torch.randn(1, 6, 4) for _ in "qkv"), mask]


def wrong(query, key, value, mask):  # mask: True = may attend
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def right(query, key, value, mask):  # mask: True = may attend
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value
