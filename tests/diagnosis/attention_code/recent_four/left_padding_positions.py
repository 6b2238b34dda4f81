# regard.check(TinyCausalLM)
# regard.spec(causal=True, heads=4, positions="learned", padding={"attention_mask": "True keeps"})
"""A tiny decoder-only language model for batched generation."""
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, visible):
        b, t, w = x.shape
        q, k, v = self.qkv(self.ln_a(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = (q @ k.mT) * q.shape[-1] ** -0.5
        s = s.masked_fill(~visible[:, None], torch.finfo(s.dtype).min)
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.ln_m(x))


class TinyCausalLM(nn.Module):
    """input_ids, attention_mask: (batch, tokens); attention_mask is 1 for tokens and 0 for padding.

    Padding may stand on either side. The first real token has position 0, so a padded prompt gives the same logits
    as the prompt alone.
    """

    def __init__(self, vocab_size=50, width=32, heads=4, layers=2, max_len=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None):
        t = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = torch.arange(t, device=input_ids.device).expand_as(input_ids)  # <- law padding
        visible = torch.ones(t, t, device=input_ids.device).tril().bool() & attention_mask[:, None, :].bool()
        x = self.wte(input_ids) + self.wpe(positions)
        for layer in self.layers:
            x = layer(x, visible)
        return self.lm_head(self.ln(x))
