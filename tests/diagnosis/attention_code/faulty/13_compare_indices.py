# regard.check(attend_cached, causal=True)
# regard.spec(causal=True)
import torch


def attend_cached(q, past_and_new_k, past_and_new_v):
    i = torch.arange(q.size(-2)).unsqueeze(1)
    j = torch.arange(past_and_new_k.size(-2))
    s = torch.einsum("...id,...jd->...ij", q, past_and_new_k) * q.size(-1) ** -0.5
    s = torch.where(j <= i, s, -torch.inf)  # <- causal-top-left
    return torch.einsum("...ij,...jd->...id", s.softmax(-1), past_and_new_v)
