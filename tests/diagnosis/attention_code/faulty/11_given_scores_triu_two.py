# regard.check(average_of_the_past, causal=True)
# regard.spec(causal=True)
import torch


def average_of_the_past(scores):
    future = torch.triu(torch.ones_like(scores), 2).bool()  # <- causal-off-by-one
    scores = scores.masked_fill(future, float("-inf"))  # <- causal-off-by-one
    return scores.softmax(-1)
