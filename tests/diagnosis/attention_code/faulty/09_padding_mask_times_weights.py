# regard.check(attention)
# regard.spec(causal=False, heads=1, padding={"padding_mask": "True hides"})
def attention(q, k, v, padding_mask):
    """padding_mask: (batch, tokens), True for padding"""
    weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(dim=-1)
    weights = weights.masked_fill(padding_mask[:, None, :], 0.0)  # <- mask-after-softmax
    return weights @ v
