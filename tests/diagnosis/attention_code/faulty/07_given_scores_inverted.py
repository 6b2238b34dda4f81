# regard.check(average_of_the_past, causal=True)
# regard.spec(causal=True)
import torch


def average_of_the_past(scores):
    triangle = torch.tril(torch.ones_like(scores))
    scores = scores.masked_fill(triangle == 1, float("-inf"))  # <- mask-inverted
    return scores.softmax(-1)
