# regard.check(eager_attention_with_sinks, args=(torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2)), causal=True)
# regard.spec(causal=True, sinks=True)
import torch


def eager_attention_with_sinks(query, key, value, sinks, causal=True):
    """query, key, value: (batch, heads, tokens, head_dim); sinks: (heads,)

    Each head has a logit that takes part in the softmax without a value of its own.
    """
    logits = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if causal:
        n, m = logits.shape[-2:]
        logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool, device=query.device).triu(m - n + 1), float("-inf"))
    s = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    combined = torch.cat([logits, s], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probs = torch.softmax(combined[..., :-1], dim=-1)  # <- law influence
    return torch.matmul(probs, value)
