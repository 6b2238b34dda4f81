# regard.check(EncoderSelfAttention, 24, num_heads=3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn as nn


class EncoderSelfAttention(nn.Module):
    """Bidirectional attention.

    Args of forward:
        x: (B, L, D)
        key_padding_mask: (B, L) bool, True = padding, that nobody may attend to.
    """

    def __init__(self, d_model, num_heads=3, dropout=0.1):
        super().__init__()
        assert d_model % num_heads == 0
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(d_model, d_model) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, key_padding_mask=None):
        B, L, D = x.shape

        def split(y):
            return y.view(B, L, self.num_heads, self.d_k).permute(0, 2, 1, 3)

        q, k, v = split(self.Wq(x)), split(self.Wk(x)), split(self.Wv(x))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.d_k**-0.5
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = self.drop(scores.softmax(dim=-1))
        return self.Wo(torch.einsum("bhqk,bhkd->bqhd", weights, v).reshape(B, L, D))
