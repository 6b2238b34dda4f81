# regard.check(average_of_the_past, causal=True)
# regard.spec(causal=True)
import torch


def average_of_the_past(scores):
    n = scores.shape[-1]
    before = torch.ones(n, n).tril(-1)  # <- causal-off-by-one
    scores = scores.masked_fill(before == 0, float("-inf"))  # <- causal-off-by-one
    return scores.softmax(-1)  # <- nan-rows
