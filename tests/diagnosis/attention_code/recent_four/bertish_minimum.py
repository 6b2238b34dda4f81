# regard.check(BertishSelfAttention)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
"""Encoder self-attention for a BERT-like model."""

import torch
from torch import nn


class BertishSelfAttention(nn.Module):
    def __init__(self, hidden_size: int = 48, num_attention_heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        new_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states: (batch, seq, hidden)
            attention_mask: (batch, seq) as the tokenizer returns it, 1 for real tokens, 0 for padding
        """
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        extended = attention_mask[:, None, None, :].to(q.dtype) * torch.finfo(q.dtype).min  # <- mask-inverted

        scores = torch.matmul(q, k.transpose(-1, -2)) / self.attention_head_size**0.5
        probs = self.dropout((scores + extended).softmax(dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).flatten(2)
        return self.dense(context)
