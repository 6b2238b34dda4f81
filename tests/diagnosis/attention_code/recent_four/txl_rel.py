# regard.check(RelMultiHeadAttn, d_model=16, n_head=2, causal=True)
# regard.spec(causal=True, heads=2, positions=regard.ANY)
import torch
import torch.nn as nn


class RelMultiHeadAttn(nn.Module):
    """Transformer-XL attention (causal), with content bias u, position bias v and sinusoids of the distance."""

    def __init__(self, d_model=16, n_head=2):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, self.d_head))
        self.r_r_bias = nn.Parameter(torch.randn(n_head, self.d_head))
        self.d_model = d_model

    @staticmethod
    def _rel_shift(x):
        b, h, i, j = x.shape
        zero = x.new_zeros(b, h, i, 1)
        x = torch.cat([zero, x], dim=-1).view(b, h, j + 1, i)
        return x[:, :, 1:].reshape(b, h, i, j)

    def forward(self, w):
        bsz, qlen, _ = w.shape
        q, k, v = self.qkv_net(w).chunk(3, dim=-1)
        q = q.view(bsz, qlen, self.n_head, self.d_head)
        k = k.view(bsz, qlen, self.n_head, self.d_head)
        v = v.view(bsz, qlen, self.n_head, self.d_head)
        pos = torch.arange(qlen - 1, -1, -1, device=w.device)
        freq = 1 / 10000 ** (torch.arange(0, self.d_model, 2, device=w.device) / self.d_model)
        ang = pos[:, None] * freq
        r = self.r_net(torch.cat([ang.sin(), ang.cos()], -1)).view(qlen, self.n_head, self.d_head)
        AC = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        BD = self._rel_shift(torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r))
        score = (AC + BD) / self.d_head ** 0.5
        hide = torch.ones(qlen, qlen, dtype=torch.bool, device=w.device).triu(1)
        prob = score.masked_fill(hide, float("-inf")).softmax(-1)
        return self.o_net(torch.einsum("bnij,bjnd->bind", prob, v).reshape(bsz, qlen, -1))
