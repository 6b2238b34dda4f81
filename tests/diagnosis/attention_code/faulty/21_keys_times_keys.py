# regard.check(dot_product_attention)
# regard.spec(causal=False, heads=1)
import torch


def dot_product_attention(queries, keys, values):
    d = queries.shape[-1]
    scores = torch.einsum("bik,bjk->bij", keys, keys) / d**0.5  # <- wrong-projection
    weights = torch.nn.functional.softmax(scores, dim=-1)
    return torch.einsum("bij,bjd->bid", weights, values), weights
