# regard.check(masked_softmax)
# regard.spec(causal=False, padding={"valid_lens": "lengths"})
import torch


def masked_softmax(X, valid_lens):
    """X: (batch, queries, keys); valid_lens: (batch,)"""
    weights = torch.softmax(X, dim=-1)
    beyond = torch.arange(X.shape[-1]) >= valid_lens[:, None, None]
    return weights.masked_fill(beyond, 0)  # <- mask-after-softmax
