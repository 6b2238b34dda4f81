# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(queries, keys, values):
    """One query at a time, for one sentence: slow, and easy to read."""
    outputs = []
    for query in queries:
        scores = torch.stack([query @ key for key in keys]) / len(query) ** 0.5
        weights = torch.softmax(scores, dim=0)
        outputs.append(sum(weight * value for weight, value in zip(weights, values)))
    return torch.stack(outputs)
