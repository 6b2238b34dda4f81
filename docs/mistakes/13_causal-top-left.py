import torch

BETWEEN = "tokens"


def example():
    """2 queries, 6 keys of which 4 lie in a cache"""
    return [torch.randn(1, 2, 4), torch.randn(1, 6, 4), torch.randn(1, 6, 4)]


def wrong(query, key, value):  # causal
    scores = query @ key.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    past = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    scores = scores.masked_fill(~past, float("-inf"))
    return scores.softmax(dim=-1) @ value


def right(query, key, value):  # causal
    scores = query @ key.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    past = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    scores = scores.masked_fill(~past, float("-inf"))
    return scores.softmax(dim=-1) @ value
