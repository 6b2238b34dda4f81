# regard.check(CrossAttention, 32, 4, args=(torch.randn(3, 6, 32), torch.randn(3, 8, 32), torch.tensor([6, 4, 2]), torch.tensor([5, 8, 7])), causal=False)
# regard.spec(causal=False, heads=4, positions=None, padding={"memory_lengths": "lengths"})
"""Seq2seq decoder attention (2021)."""
import torch
import torch.nn as nn


class CrossAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.scale = (d_model // n_heads) ** -0.5
        self.q = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, tgt, memory, tgt_lengths, memory_lengths):
        """tgt: (batch, T, d); memory: (batch, S, d); lengths: real tokens of each side. Padded outputs are zero."""
        b, T, d = tgt.shape
        S = memory.shape[1]
        q = self.q(tgt).view(b, T, self.n_heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(b, S, 2, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        tgt_real = torch.arange(T, device=tgt.device) < tgt_lengths[:, None]
        memory_real = torch.arange(S, device=tgt.device) < tgt_lengths[:, None]  # <- law influence
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores.masked_fill(~memory_real[:, None, None, :], -1e9)  # <- law influence
        out = self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, T, d))
        return out * tgt_real[..., None]
