# regard.check(attend)
# regard.spec(causal=False, heads=1, padding={"lengths": "lengths"})
import torch


def attend(q, k, v, lengths):
    """q, k, v: (batch, tokens, dim); lengths: (batch,) how many tokens are real."""
    n = q.shape[1]
    real = torch.arange(n) < lengths[:, None]
    allowed = torch.einsum("bi,bj->bij", real.float(), real.float())
    scores = torch.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5 + allowed.log()
    return torch.einsum("bij,bjd->bid", scores.softmax(-1), v)  # <- nan-rows
