# regard.check(LeftPadCausalAttention, args=(torch.randn(2, 7, 24), torch.arange(7) < torch.tensor([[3], [0]])))
# regard.spec(causal=True, heads=3, positions="learned", padding={"pad_mask": "True hides"})
import torch
import torch.nn as nn


class LeftPadCausalAttention(nn.Module):
    """Decoder attention with learned positions that are added to the input of the projections.

    pad_mask: (B, T) bool, True = padding. Padding stands on the left, and it does not count: the first real token
    of each row is at position 0, so a prompt gives the same outputs with and without padding.
    """

    def __init__(self, dim=24, heads=3, max_len=64):
        super().__init__()
        self.heads = heads
        self.pos = nn.Embedding(max_len, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, pad_mask):
        B, T, D = x.shape
        index = torch.arange(T, device=x.device).expand(B, T)  # <- law padding
        h = x + self.pos(index)
        q, k, v = self.qkv(h).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        s = s.masked_fill(future | pad_mask[:, None, None, :], -1e9)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
