# regard.check(BertSdpaSelfAttention, 32, 4, means={'attention_mask': 'added to the scores'})
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
import torch
from torch import nn


class BertSdpaSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout_prob = 0.1

    def heads(self, x):
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).movedim(-2, -3)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        """attention_mask: (batch, 1, 1, tokens), 0 for words and a huge negative number for padding."""
        q = self.heads(self.query(hidden_states))
        k = self.heads(self.key(hidden_states))
        v = self.heads(self.value(hidden_states))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, dropout_p=self.dropout_prob if self.training else 0.0
        )
        return out.movedim(-3, -2).flatten(-2)
