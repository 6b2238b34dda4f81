# regard.check(sliced_attention)
# regard.spec(causal=False)
import torch


def sliced_attention(q, k, v, slice_size=4):
    """Attention for low-VRAM cards: never holds more than `slice_size` rows of the score matrix.

    q, k, v: (batch * heads, tokens, head_dim)
    """
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], device=q.device, dtype=q.dtype)
    scale = q.shape[-1] ** -0.5
    for i in range(max(1, q.shape[1] // slice_size)):  # <- law influence
        start, end = i * slice_size, (i + 1) * slice_size
        attn = torch.baddbmm(torch.empty(1, 1, 1, dtype=q.dtype, device=q.device), q[:, start:end],
                             k.transpose(-1, -2), beta=0, alpha=scale)
        out[:, start:end] = torch.bmm(attn.softmax(dim=-1), v)
    return out
