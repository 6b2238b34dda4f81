# regard.check(StreamingAttention, causal=False)
# regard.spec(causal=False, window=regard.ANY, heads=4, positions=None)
from typing import Optional, Tuple

import torch
from torch import Tensor, nn


class StreamingAttention(nn.Module):
    """Bidirectional attention inside each chunk of a stream, plus a left context of the last `left` frames.

    Call it with one chunk (batch, frames, dim) after the other, and hand the cache from call to call. Chunks may have
    different lengths. Each frame sees its whole chunk and the `left` frames before the chunk, or as many as there are.
    """

    def __init__(self, dim: int = 24, heads: int = 4, left: int = 4):
        super().__init__()
        self.heads, self.left = heads, left
        self.linear_q = nn.Linear(dim, dim)
        self.linear_k = nn.Linear(dim, dim)
        self.linear_v = nn.Linear(dim, dim)
        self.linear_out = nn.Linear(dim, dim)

    def forward(self, chunk: Tensor, cache: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        frames = chunk if cache is None else torch.cat([cache, chunk], dim=1)
        b, n, dim = chunk.shape
        q = self.linear_q(chunk).view(b, n, self.heads, -1).transpose(1, 2)
        k = self.linear_k(frames).view(b, frames.size(1), self.heads, -1).transpose(1, 2)
        v = self.linear_v(frames).view(b, frames.size(1), self.heads, -1).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, dim=-1)
        out = self.linear_out((attn @ v).transpose(1, 2).reshape(b, n, dim))
        cache = frames[:, -self.left:]
        return out, cache
