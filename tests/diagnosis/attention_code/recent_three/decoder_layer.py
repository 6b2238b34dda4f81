# regard.check(DecoderLayer, 32, 4, means={"memory_key_padding_mask": "True hides"}, causal=True)
# regard.spec(causal=True, heads=4, positions=None,padding={"memory_key_padding_mask":"True hides"})
import torch
import torch.nn as nn


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: causal self-attention, cross-attention to the memory, feed-forward."""

    def __init__(self, d_model, nhead, dim_feedforward=64, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.ff = nn.Sequential(
            nn.Linear(d_model, dim_feedforward), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim_feedforward, d_model)
        )
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tgt, memory, memory_key_padding_mask=None):
        """memory_key_padding_mask: (batch, source), True = padding."""
        T = tgt.size(1)
        causal = torch.triu(torch.ones(T, T, dtype=torch.bool, device=tgt.device), diagonal=1)
        h, _ = self.self_attn(tgt, tgt, tgt, attn_mask=causal, need_weights=False)
        x = self.norm1(tgt + self.dropout(h))
        h, _ = self.cross_attn(
            x, memory, memory, key_padding_mask=memory_key_padding_mask, need_weights=False
        )
        x = self.norm2(x + self.dropout(h))
        return self.norm3(x + self.dropout(self.ff(x)))
