# regard.check(EncoderSelfAttention)
# regard.spec(causal=False,heads=3,positions=None,padding={"attention_mask":"added to the scores"})
from dataclasses import dataclass
from typing import Optional
import torch
from torch import nn


@dataclass
class AttentionOutput:
    last_hidden_state: torch.Tensor
    attentions: Optional[torch.Tensor] = None


class EncoderSelfAttention(nn.Module):
    def __init__(self, config_hidden: int = 24, config_heads: int = 3):
        super().__init__()
        self.heads = config_heads
        self.fused = nn.Linear(config_hidden, 3 * config_hidden)
        self.dense = nn.Linear(config_hidden, config_hidden)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        """
        attention_mask (`torch.FloatTensor` of shape `(batch_size, 1, 1, seq_len)`, *optional*):
            additive; 0 for tokens and the most negative float for padding. It is summed with the scores.
        """
        b, n, c = hidden_states.shape
        # columns of the projection: head by head, and in each head q, k, v (as in GPT-NeoX)
        q, k, v = self.fused(hidden_states).view(b, n, self.heads, 3, c // self.heads).permute(3, 0, 2, 1, 4)
        scores = torch.baddbmm(q.new_zeros(1).expand(b * self.heads, n, n), q.flatten(0, 1), k.flatten(0, 1).mT,
                               beta=0.0, alpha=(c // self.heads) ** -0.5).view(b, self.heads, n, n)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(b, n, c)
        return AttentionOutput(self.dense(mixed), weights if output_attentions else None)
