# regard.check(attend)
# regard.spec(causal=False, heads=1)
"""Weights times values by broadcasting, and a sum over the wrong one of the two lengths."""


def attend(query, key, value):
    scores = (query[:, :, None] * key[:, None]).sum(-1) / query.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    mixed = weights[..., None] * value[:, None]
    return mixed.sum(1)  # <- values-mixed-along-wrong-axis
