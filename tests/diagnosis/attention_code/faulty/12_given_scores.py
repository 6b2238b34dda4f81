# regard.check(weights_of, causal=True)
# regard.spec(causal=True)
def weights_of(scores):
    return scores.softmax(-1)  # <- not-causal
