# regard.check(GQA)
# regard.spec(causal=False, heads=8, kv_heads=2, positions=None)
import torch, torch.nn as nn
class GQA(nn.Module):
    def __init__(self, dim=64, n_heads=8, n_kv=2):
        super().__init__()
        self.h, self.kv, self.hd = n_heads, n_kv, dim // n_heads
        self.q = nn.Linear(dim, n_heads*self.hd, bias=False)
        self.k = nn.Linear(dim, n_kv*self.hd, bias=False)
        self.v = nn.Linear(dim, n_kv*self.hd, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
    def forward(self, x):
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.h, self.hd).transpose(1, 2)
        k = self.k(x).view(B, T, self.kv, self.hd).transpose(1, 2).repeat(1, self.h//self.kv, 1, 1)  # <- kv-heads-repeated-in-wrong-order
        v = self.v(x).view(B, T, self.kv, self.hd).transpose(1, 2).repeat_interleave(self.h//self.kv, 1)
        return self.o(((q @ k.mT * self.hd ** -.5).softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
