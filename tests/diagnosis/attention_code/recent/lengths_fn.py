# regard.check(masked_attention)
# regard.spec(causal=False, heads=1, padding={"valid_lens": "lengths"})
import torch


def masked_attention(queries, keys, values, valid_lens=None):
    """Scaled dot-product attention (d2l style).

    queries: (batch, no. of queries, d); keys, values: (batch, no. of pairs, d)
    valid_lens: (batch,) number of real key-value pairs of each sample
    """
    d = queries.shape[-1]
    scores = torch.bmm(queries, keys.transpose(1, 2)) / d**0.5
    if valid_lens is not None:
        pos = torch.arange(keys.size(1), device=keys.device)
        scores = scores.masked_fill(pos[None, None, :] >= valid_lens[:, None, None], -1e6)
    return torch.bmm(torch.softmax(scores, dim=-1), values)
