# regard.check(attention, causal=True)
# regard.spec(causal=True)


def attention(q, k, v):
    scores = q @ k.transpose(-1, -2)  # <- no-scale
    for i in range(q.shape[-2]):
        scores[..., i, i + 2 :] = float("-inf")  # <- causal-off-by-one
    return scores.softmax(-1) @ v
