# regard.check(average_of_the_past, causal=True)
# regard.spec(causal=True)
def average_of_the_past(scores, values):
    weights = scores.softmax(-1)
    weights = weights.tril()  # <- mask-after-softmax
    return weights @ values
