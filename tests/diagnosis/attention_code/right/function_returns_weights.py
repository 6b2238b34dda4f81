# regard.check(attention, means={"mask": "True keeps"})
# regard.spec(causal=False, padding={"mask": "True keeps"})
import torch
import torch.nn.functional as F


def attention(query, key, value, mask=None, dropout_p=0.0):
    """Returns what was read and how it was weighed; mask: True where one may look."""
    scores = torch.matmul(query, key.mT) * query.size(-1) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, -1)
    weights = F.dropout(weights, dropout_p)
    return weights @ value, weights
