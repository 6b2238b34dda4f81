# regard.check(efficient_attention, axes={"query": "batch tokens heads dim", "key": "batch tokens heads dim", "value": "batch tokens heads dim"})
# regard.spec(causal=False)
"""Self-attention does not need O(n^2) memory (Rabe and Staats), in PyTorch."""
import math

import torch


def _chunk_scanner(q, k_chunk, v_chunk):
    s = torch.einsum("bqhd,bkhd->bqhk", q, k_chunk)
    max_score = s.amax(dim=-1, keepdim=True).detach()
    exp_weights = torch.exp(s - max_score)
    exp_values = torch.einsum("bvhd,bqhv->bqhd", v_chunk, exp_weights)
    return exp_values, exp_weights.sum(dim=-1), max_score.squeeze(-1)


def efficient_attention(query, key, value, query_chunk_size=4, key_chunk_size=3):
    """query, key, value: (batch, tokens, heads, dim) -> (batch, tokens, heads, dim)"""
    query = query / math.sqrt(query.shape[-1])
    out = []
    for q in query.split(query_chunk_size, dim=1):
        vals, sums, maxes = zip(
            *[
                _chunk_scanner(q, kc, vc)
                for kc, vc in zip(key.split(key_chunk_size, dim=1), value.split(key_chunk_size, dim=1))
            ]
        )
        vals, sums, maxes = torch.stack(vals), torch.stack(sums), torch.stack(maxes)
        global_max = maxes.amax(dim=0, keepdim=True)
        diff = torch.exp(maxes - global_max)
        all_values = (vals * diff.unsqueeze(-1)).sum(dim=0)
        all_weights = (sums * diff).sum(dim=0)
        out.append(all_values / all_weights.unsqueeze(-1))
    return torch.cat(out, dim=1)
