# regard.check(DecoderAttention, 32, 4)
# regard.spec(heads=4, positions=None, padding={"attn_mask": "True keeps"})
import torch, torch.nn as nn

class DecoderAttention(nn.Module):
    """Masked self-attention; attn_mask is boolean [T, T], True where attention is allowed."""
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.in_proj = nn.Linear(width, width * 3)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x, attn_mask):
        b, t, w = x.size()
        q, k, v = self.in_proj(x).reshape(b, t, 3, self.n_heads, w // self.n_heads).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / (w // self.n_heads) ** 0.5
        logits = logits + attn_mask.to(logits.dtype)  # <- mask-added-as-numbers
        y = logits.softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(b, t, w))
