# regard.check(SinkAttention, causal=True)
# regard.spec(causal=True, heads=4, positions=None, sinks=True)
import torch
from torch import nn


class SinkAttention(nn.Module):
    """Causal attention with one learned sink logit per head, in the manner of gpt-oss.
    The sink takes part in the softmax and has no value: its share of the weight is thrown away."""

    def __init__(self, d_model: int = 32, n_heads: int = 4):
        super().__init__()
        self.n_heads = n_heads
        self.sinks = nn.Parameter(torch.randn(n_heads))
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n_batch, n_tok, d = x.shape
        q, k, v = (t.view(n_batch, n_tok, self.n_heads, -1).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1))
        qk = q @ k.mT / (d // self.n_heads) ** 0.5
        qk = qk + torch.triu(torch.full_like(qk, -torch.inf), diagonal=1)
        s = self.sinks.view(1, -1, 1, 1).expand(n_batch, -1, n_tok, 1)
        w = torch.cat([qk, s], dim=-1).softmax(dim=-1)
        w = w[..., 1:]  # <- law influence
        return self.out((w @ v).transpose(1, 2).reshape(n_batch, n_tok, d))
