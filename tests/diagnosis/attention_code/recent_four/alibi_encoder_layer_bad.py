# regard.check(AlibiEncoder, means={'padding': 'True hides'}, causal=False)
# regard.spec(causal=False, heads=3, positions="alibi", padding={"padding": "True hides"})
import torch
from torch import nn


class AlibiEncoder(nn.Module):
    """A stock nn.TransformerEncoderLayer with symmetric ALiBi: head h loses 2 ** -(h + 1) per token of distance.

    src: (batch, tokens, d_model). padding: (batch, tokens), True at padding.
    """

    def __init__(self, d_model=24, nhead=3):
        super().__init__()
        self.nhead = nhead
        self.layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=32, dropout=0.0, batch_first=True,
                                                norm_first=True)

    def forward(self, src, padding=None):
        b, n, _ = src.shape
        pos = torch.arange(n, device=src.device, dtype=src.dtype)
        slopes = 2.0 ** -torch.arange(1, self.nhead + 1, device=src.device, dtype=src.dtype)
        bias = -slopes.view(-1, 1, 1) * (pos[:, None] - pos[None, :]).abs()
        src_mask = bias.repeat_interleave(b, dim=0)  # <- law samples
        if padding is not None:
            padding = torch.zeros_like(padding, dtype=src.dtype).masked_fill(padding, float("-inf"))
        return self.layer(src, src_mask=src_mask, src_key_padding_mask=padding)
