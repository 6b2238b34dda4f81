# regard.check(QKNormMQA)
# regard.spec(causal=False,heads=4,kv_heads=1,qk_norm="layer",padding={"padding_mask":"True hides"})
import torch
from torch import nn
from torch.nn import functional as F


class QKNormMQA(nn.Module):
    """Multi-query self-attention with LayerNorm on queries and keys (ViT-22B). Bidirectional.

    padding_mask: bool (batch, seq), True where the token is padding; every row needs a real token.
    """

    def __init__(self, width: int = 32, num_q_heads: int = 4):
        super().__init__()
        self.nq = num_q_heads
        self.hd = width // num_q_heads
        self.fused = nn.Linear(width, width + 2 * self.hd)
        self.q_ln = nn.LayerNorm(self.hd)
        self.k_ln = nn.LayerNorm(self.hd)
        self.out = nn.Linear(width, width)

    def forward(self, x, padding_mask=None):
        bsz, seq, width = x.shape
        q, k, v = self.fused(x).split([width, self.hd, self.hd], dim=-1)
        q = self.q_ln(q.view(bsz, seq, self.nq, self.hd))
        k = self.k_ln(k)
        # all heads of a token next to each other: one big (seq*heads) x seq product
        scores = torch.bmm(q.reshape(bsz, seq * self.nq, self.hd), k.transpose(1, 2)) / self.hd**0.5
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask.unsqueeze(1), float("-inf"))
        ctx = torch.bmm(F.softmax(scores, dim=2), v)
        return self.out(ctx.view(bsz, seq, width))
