# regard.check(masked_softmax)
# regard.spec(causal=False, padding={"mask": "True keeps"})
import torch


def masked_softmax(scores, mask):
    """mask: True where a query may attend to a key"""
    return torch.softmax(scores.masked_fill(mask == 0, -1e9), dim=-1)
