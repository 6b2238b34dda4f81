# regard.check(attend, causal=True, means={"attn_mask": "True hides"})
# regard.spec(causal=True, padding={"attn_mask": "True hides"})
import torch


def attend(q, k, v, attn_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, -torch.inf)
    return scores.softmax(-1) @ v
