# regard.check(attend)
# regard.spec(causal=False, heads=1, padding={"lengths": "lengths"})
import torch


def attend(q, k, v, lengths):
    scores = torch.bmm(q, k.transpose(1, 2)) * q.size(-1) ** -0.5
    padding = torch.arange(k.size(1)) >= lengths[0]
    scores = scores.masked_fill(padding[None, None, :], float("-inf"))  # <- mask-of-another-sample
    return torch.bmm(torch.softmax(scores, -1), v)
