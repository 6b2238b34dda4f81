import torch
import regard

BETWEEN = "tokens"


def example():
    """the · cat · and · the · dog"""
    words = torch.randn(4, 8)
    return [words[[0, 1, 2, 0, 3]][None]]


def wrong(x):  # the embeddings of "the cat and the dog": no positions
    return (x @ x.mT / x.shape[-1] ** 0.5).softmax(dim=-1) @ x


def right(x):
    x = x + regard.nn.SinusoidalPositions(x.shape[-1])(torch.zeros_like(x))
    return (x @ x.mT / x.shape[-1] ** 0.5).softmax(dim=-1) @ x
