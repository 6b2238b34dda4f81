# regard.check(CharGPT, causal=True)
# regard.spec(causal=True, heads=4, positions="learned")
"""char-level GPT, one file."""
import torch, math
import torch.nn as nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(s, d, h):
        super().__init__()
        s.h = h
        s.ln1 = nn.LayerNorm(d); s.ln2 = nn.LayerNorm(d)
        s.att = nn.Linear(d, 3 * d, bias=False); s.prj = nn.Linear(d, d, bias=False)
        s.up = nn.Linear(d, 4 * d); s.down = nn.Linear(4 * d, d)
    def forward(s, x):
        B, T, C = x.shape
        q, k, v = s.att(s.ln1(x)).view(B, T, 3, s.h, C // s.h).permute(2, 0, 3, 1, 4)
        w = q @ k.transpose(-1, -2) / math.sqrt(C // s.h)
        w = w + torch.full((T, T), -torch.inf, device=x.device).triu(1)
        y = (F.softmax(w, -1) @ v).transpose(1, 2).reshape(B, T, C)
        x = x + s.prj(y)
        return x + s.down(F.gelu(s.up(s.ln2(x))))

class CharGPT(nn.Module):
    """Stack of n_layer causal blocks; every block refines the output of the block before it."""
    def __init__(s, vocab=40, d=32, n_head=4, n_layer=3, ctx=64):
        super().__init__()
        s.tok = nn.Embedding(vocab, d); s.pos = nn.Embedding(ctx, d)
        s.blocks = nn.ModuleList(Block(d, n_head) for _ in range(n_layer))
        s.ln_f = nn.LayerNorm(d); s.head = nn.Linear(d, vocab, bias=False)
    def forward(s, idx):
        x = s.tok(idx) + s.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in s.blocks:
            h = block(x)  # <- law gradient
        return s.head(s.ln_f(h))
