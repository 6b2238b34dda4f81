# regard.check(FlexAlibi)
# regard.spec(causal=True, heads=4, positions={"kind":"alibi","slopes":[1/4, 1/16, 1/64, 1/256]})
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention


class FlexAlibi(nn.Module):
    """Causal ALiBi attention written as a score_mod for FlexAttention."""

    def __init__(self, d_model: int = 32, n_heads: int = 4) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.register_buffer("slope", torch.exp2(-8.0 * torch.arange(1, n_heads + 1) / n_heads))
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        def to_heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        slope = self.slope

        def alibi(score, b, h, q_idx, kv_idx):
            score = score + slope[h] * (kv_idx - q_idx)
            return torch.where(q_idx >= kv_idx, score, -float("inf"))

        y = flex_attention(to_heads(self.wq(x)), to_heads(self.wk(x)), to_heads(self.wv(x)), score_mod=alibi)
        return self.wo(y.transpose(1, 2).flatten(2))
