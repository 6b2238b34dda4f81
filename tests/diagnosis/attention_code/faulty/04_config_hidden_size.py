# regard.check(SelfAttention(Config()))
# regard.spec(causal=False, heads=6, positions=None)
import math

import torch
from torch import nn


class Config:
    hidden_size = 48
    num_attention_heads = 6


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x):
        x = x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.all_head_size)  # <- scale-by-embed-dim
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return (context.view(*context.size()[:-2], self.all_head_size),)
