# regard.check(attention)
# regard.spec(causal=False)
def attention(*, query, key, value):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
