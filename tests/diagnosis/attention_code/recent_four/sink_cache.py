# regard.check(StreamingSinkAttention, causal=True)
# regard.spec(causal=True, window=regard.ANY, heads=3, positions=None)
import torch
from torch import nn


class StreamingSinkAttention(nn.Module):
    """Causal attention with a sliding window and attention sinks, for endless streams.

    A token sees itself, the `window` - 1 tokens before it, and the first `n_sink` tokens of the stream. x: (batch, new
    tokens, dim). Returns the output and the cache, to be passed with the next tokens.
    """

    def __init__(self, dim=24, heads=3, n_sink=2, window=3):
        super().__init__()
        self.heads, self.n_sink, self.window = heads, n_sink, window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def trim(self, k, v, pos):
        if pos.numel() > self.n_sink + self.window:
            s, w = self.n_sink, self.window
            k = torch.cat([k[:, :, :s], k[:, :, -w:]], dim=2)
            v = torch.cat([v[:, :, :s], v[:, :, -w:]], dim=2)
            pos = torch.cat([pos[:s], pos[-w:]])
        return k, v, pos

    def forward(self, x, cache=None):
        b, n, dim = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        seen = 0 if cache is None else int(cache[2][-1]) + 1
        q_pos = torch.arange(seen, seen + n, device=x.device)
        pos = q_pos
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
            pos = torch.cat([cache[2], pos])
        back = q_pos[:, None] - pos[None, :]
        keep = (back >= 0) & ((back < self.window) | (pos < self.n_sink))
        score = (q @ k.mT) / (dim // self.heads) ** 0.5
        y = score.masked_fill(~keep, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, dim)), self.trim(k, v, pos)
