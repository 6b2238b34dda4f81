# regard.check(Attention, 32, 4, args=(torch.randn(2,9,32), torch.polar(torch.ones(9,4), torch.arange(9.)[:,None]*torch.tensor([1.,.1,.01,.001]))), causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "rotary", "pairing": "neighbours"})
import torch
from torch import nn


def apply_rotary_emb(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * freqs_cis[None, :, None, :]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.h = n_heads
        self.hd = dim // n_heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, freqs_cis):
        """freqs_cis: (tokens, head_dim / 2) complex numbers of length 1."""
        b, t, _ = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.h, self.hd).unbind(2)
        q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))
