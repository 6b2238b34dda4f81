# regard.check(attention)
# regard.spec(causal=False, heads=1, padding={"attention_mask": "True keeps"})
import torch


def attention(q, k, v, attention_mask=None):
    """attention_mask: (batch, tokens), 1 = word, 0 = padding"""
    logits = q @ k.transpose(1, 2) * k.size(-1) ** -0.5
    if attention_mask is not None:
        logits = logits + attention_mask[:, None, :].to(logits.dtype)  # <- mask-added-as-numbers
    probs = torch.softmax(logits, dim=2)
    return probs @ v
