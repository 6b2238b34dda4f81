# regard.check(SentenceEncoder)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class SentenceEncoder(nn.Module):
    """Self-attention layer of a sentence encoder.

    attention_mask: (batch, tokens), 1 for tokens and 0 for padding, which may stand on either side.
    """

    def __init__(self, hidden_size=32, num_attention_heads=4):
        super().__init__()
        self.nh = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, attention_mask):
        b, n, c = x.shape
        q = self.query(x).view(b, n, self.nh, c // self.nh).transpose(1, 2)
        k = self.key(x).view(b, n, self.nh, c // self.nh).transpose(1, 2)
        v = self.value(x).view(b, n, self.nh, c // self.nh).transpose(1, 2)
        keep = torch.arange(n, device=x.device) < attention_mask.sum(-1, keepdim=True)  # <- law padding
        y = scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.dense(y.transpose(1, 2).reshape(b, n, c))
