# regard.check(masked_softmax)
# regard.spec(padding={"mask": "True keeps"})
import torch


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor = None) -> torch.Tensor:
    """Turns attention scores (batch, heads, queries, keys) into weights.

    :param mask: (batch, keys); zero marks the keys that get no weight. A row without any key becomes zeros.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    m = mask[:, None, None, :].to(scores.dtype)
    peak = scores.masked_fill(m == 0, -torch.inf).amax(dim=-1, keepdim=True)
    peak = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    e = torch.exp((scores - peak).masked_fill(m == 0, -torch.inf))
    total = e.sum(dim=-1, keepdim=True)
    return e / torch.where(total == 0, torch.ones_like(total), total)
