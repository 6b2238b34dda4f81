# regard.check(attend)
# regard.spec(causal=False, heads=1)
def attend(q, k, v):
    b, n, d = k.shape
    scores = q @ k.view(b, d, n) / d**0.5  # <- keys-not-transposed
    return scores.softmax(-1) @ v
