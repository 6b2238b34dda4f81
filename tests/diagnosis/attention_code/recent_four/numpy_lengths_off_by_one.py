# regard.check(masked_attention, args=(np.random.randn(2, 6, 8), np.random.randn(2, 6, 8), np.random.randn(2, 6, 8), np.array([6, 3])))
# regard.spec(causal=False, heads=1, padding={"lengths": "lengths"})
import numpy as np


def masked_attention(queries, keys, values, lengths):
    """Batched attention over padded sequences.

    queries (B, N, D), keys (B, M, D), values (B, M, D)
    lengths (B,): number of real keys in each sample; keys lengths[b], lengths[b]+1, ... are padding
    """
    scores = np.einsum("bnd,bmd->bnm", queries, keys) / np.sqrt(queries.shape[-1])
    place = np.arange(keys.shape[1])
    real = place[None, :] <= lengths[:, None]  # <- law padding
    scores = np.where(real[:, None, :], scores, -1e30)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnm,bmd->bnd", weights, values)
