# regard.check(attention)
# regard.spec(causal=False)


def attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores - scores.mean(0, keepdim=True)  # <- attends-across-batch
    return scores.softmax(-1) @ v
