import torch

BETWEEN = "tokens"


def example():
    """3 samples of 4 tokens"""
    return [torch.randn(3, 4, 8)]


def wrong(x):  # (batch, tokens, embed_dim)
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2)
    return layer(x, x, x)[0]


def right(x):  # (batch, tokens, embed_dim)
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return layer(x, x, x)[0]
