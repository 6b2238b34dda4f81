import torch

BETWEEN = "heads"


def example():
    """4 query heads down, 2 heads of values across"""
    return [torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)]


def wrong(query, key, value):  # 4 query heads, 2 heads of keys and values
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1) @ value


def right(query, key, value):  # 4 query heads, 2 heads of keys and values
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1) @ value
