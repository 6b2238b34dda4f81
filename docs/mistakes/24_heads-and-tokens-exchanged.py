import torch

BETWEEN = "tokens_first"


def example():
    """6 tokens, 3 heads"""
    return [torch.randn(1, 6, 3, 4) for _ in "qkv"]


def wrong(query, key, value):  # (batch, tokens, heads, head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value)  # takes (batch, heads, tokens, head_dim)


def right(query, key, value):  # (batch, tokens, heads, head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attend(query, key, value).transpose(1, 2)
