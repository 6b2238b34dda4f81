# regard.check(average)
# regard.spec(causal=False)
def average(scores, values):
    w = scores.softmax(-1)
    parts = w.unsqueeze(-1) * values.unsqueeze(-3)  # (queries, keys, 1) times (1, keys, dim)
    return parts.sum(-3)  # <- values-mixed-along-wrong-axis
