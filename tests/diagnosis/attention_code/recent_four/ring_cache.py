# regard.check(ring_buffer_attention, args=(torch.randn(2, 7, 16), torch.arange(7), torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4, 6), torch.randn(16, 54) / 4, torch.randn(18, 16) / 4), causal=True)
# regard.spec(causal=True, window=4, heads=3, positions=None)
import torch


def ring_buffer_attention(x, positions, k_cache, v_cache, w_qkv, w_out):
    """Causal attention with a sliding window, whose cache is a ring buffer.

    x: (batch, tokens, dim), the next tokens. positions: (tokens,), their positions, from 0. k_cache and v_cache: (batch,
    heads, window, head_dim), zeros at first; they are written in place. Each token sees itself and the window - 1 tokens
    before it. w_qkv: (dim, 3 * heads * head_dim), w_out: (heads * head_dim, dim).
    """
    b, n, _ = x.shape
    heads, size, d = k_cache.shape[1:]
    q, k, v = (x @ w_qkv).view(b, n, 3, heads, d).unbind(2)
    slots = torch.arange(size, device=x.device)
    outs = []
    for t in range(n):
        p = int(positions[t])
        k_cache[:, :, p % size] = k[:, t]
        v_cache[:, :, p % size] = v[:, t]
        filled = slots <= min(p, size - 1)
        s = torch.einsum("bhd,bhsd->bhs", q[:, t], k_cache) * d ** -0.5
        w = s.masked_fill(~filled, float("-inf")).softmax(-1)
        outs.append(torch.einsum("bhs,bhsd->bhd", w, v_cache).flatten(1))
    return torch.stack(outs, 1) @ w_out
