# regard.check(Encoder, 24)
# regard.spec(causal=False, heads=1, positions=None, padding={"valid_lens": "lengths"})
"""Everything beyond the length is kept, and the sentence itself is shut out."""
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, valid_lens):
        keep = torch.arange(x.shape[1])[None] >= valid_lens[:, None]  # <- mask-inverted
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=keep[:, None])  # <- mask-inverted
