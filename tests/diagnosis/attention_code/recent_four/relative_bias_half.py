# regard.check(RelativeBiasAttention)
# regard.spec(causal=False, heads=4, positions="table")
import torch
import torch.nn as nn


class RelativeBiasAttention(nn.Module):
    """
    Self-attention with learned relative position biases, for encoders.

    The table has 2 * clip + 1 rows: -clip ... clip. Row d + clip belongs to keys d places to the right of the query
    (d < 0: to the left), so both directions have biases of their own. Farther keys use the row at the border.
    """

    def __init__(self, model_dim=32, num_heads=4, clip=4):
        super().__init__()
        self.num_heads = num_heads
        self.clip = clip
        self.to_qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.to_out = nn.Linear(model_dim, model_dim)
        self.bias_table = nn.Embedding(2 * clip + 1, num_heads)

    def relative_bias(self, length, device):
        place = torch.arange(length, device=device)
        offset = place.view(1, -1) - place.view(-1, 1)
        offset = offset.clamp(min=0, max=self.clip)  # <- law gradient
        return self.bias_table(offset + self.clip).permute(2, 0, 1).unsqueeze(0)

    def forward(self, tokens):
        batch, length, dim = tokens.shape
        q, k, v = self.to_qkv(tokens).chunk(3, dim=-1)
        q = q.view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.num_heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.num_heads, -1).transpose(1, 2)
        logits = torch.matmul(q, k.transpose(-1, -2)) / (dim // self.num_heads) ** 0.5
        logits = logits + self.relative_bias(length, tokens.device)
        mixed = torch.matmul(logits.softmax(dim=-1), v)
        return self.to_out(mixed.transpose(1, 2).reshape(batch, length, dim))
