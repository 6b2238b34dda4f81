# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""One minus the mask, and the large number forgotten."""
import torch


def attention(query, key, value):
    scores = torch.einsum("...qd,...kd->...qk", query, key) * query.size(-1) ** -0.5
    look = torch.ones_like(scores).tril()
    scores = scores - (1.0 - look)  # <- mask-added-as-numbers
    return scores.softmax(-1) @ value
