# regard.check(attention, axes="batch heads tokens dim")
# regard.spec(causal=False)
def attention(q, k, v):
    batch, heads, tokens, dim = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = q @ k.transpose(-2, -1) / dim**0.5  # <- heads-and-tokens-exchanged
    return (scores.softmax(-1) @ v).transpose(1, 2)
