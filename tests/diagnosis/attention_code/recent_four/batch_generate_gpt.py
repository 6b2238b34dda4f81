# regard.check(LeftPaddedCausalLM, args=(torch.randint(0, 31, (2, 8)), (torch.arange(8) >= torch.tensor([[0], [3]])).long()), causal=True)
# regard.spec(causal=True, heads=2, positions="learned", padding={"attention_mask": "True keeps"})
"""Small GPT for batched generation: prompts of different length are padded on the left."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        s = q @ k.transpose(-2, -1) / (d // self.h) ** 0.5
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        x = x + self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class LeftPaddedCausalLM(nn.Module):
    """attention_mask: (batch, tokens), 1 = token, 0 = padding (on the left).

    The logits of a prompt do not depend on its padding, nor on the other prompts.
    """

    def __init__(self, vocab=31, d=16, h=2, layers=1, max_len=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList([Block(d, h) for _ in range(layers)])
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, input_ids, attention_mask):
        b, t = input_ids.shape
        n_pad = (attention_mask == 0).sum(-1, keepdim=True).max()  # <- attends-across-batch
        position_ids = (torch.arange(t, device=input_ids.device)[None] - n_pad).clamp(min=0)
        x = self.tok(input_ids) + self.pos(position_ids)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None, None] & attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.ln(x))
