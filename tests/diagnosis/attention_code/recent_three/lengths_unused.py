# regard.check(SentenceAttention, 32, args=(torch.randn(3, 6, 32), torch.tensor([6, 4, 2])), causal=False)
"""Sentence encoder with lengths (2019)."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def sequence_mask(lengths, max_len):
    return torch.arange(max_len, device=lengths.device).unsqueeze(0) < lengths.unsqueeze(1)


class SentenceAttention(nn.Module):
    def __init__(self, hidden, heads=4):
        super(SentenceAttention, self).__init__()
        self.heads = heads
        self.fc_q = nn.Linear(hidden, hidden)
        self.fc_k = nn.Linear(hidden, hidden)
        self.fc_v = nn.Linear(hidden, hidden)
        self.fc_o = nn.Linear(hidden, hidden)

    def forward(self, src, src_lengths):
        """src: (batch, time, hidden); src_lengths: number of words of each sentence"""
        B, T, H = src.size()
        mask = sequence_mask(src_lengths, T).unsqueeze(1).unsqueeze(2)  # <- mask-unused
        Q = self.fc_q(src).view(B, T, self.heads, -1).permute(0, 2, 1, 3)
        K = self.fc_k(src).view(B, T, self.heads, -1).permute(0, 2, 1, 3)
        V = self.fc_v(src).view(B, T, self.heads, -1).permute(0, 2, 1, 3)
        energy = torch.matmul(Q, K.permute(0, 1, 3, 2)) / math.sqrt(H // self.heads)  # <- mask-unused
        attention = F.softmax(energy, dim=-1)  # <- mask-unused
        x = torch.matmul(attention, V).permute(0, 2, 1, 3).contiguous()
        return self.fc_o(x.view(B, T, H))
