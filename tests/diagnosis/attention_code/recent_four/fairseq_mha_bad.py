# regard.check(MultiheadAttention, args=(torch.randn(5, 2, 24), torch.randn(7, 2, 24), torch.randn(7, 2, 24)), kwargs={'key_padding_mask': torch.arange(7) >= torch.tensor([[7], [5]])})
# regard.spec(heads=4, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiheadAttention(nn.Module):
    """Multi-headed attention, time first.

    query: (tgt_len, batch, embed_dim). key, value: (src_len, batch, embed_dim).
    key_padding_mask: (batch, src_len), True for padding.
    Returns the output, and the weights (batch, num_heads, tgt_len, src_len) if need_weights, else None.
    """

    def __init__(self, embed_dim=24, num_heads=4, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True):
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(key)
        v = self.v_proj(value)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            attn = attn.view(bsz, self.num_heads, tgt_len, src_len)
            attn = attn.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf"))
            attn = attn.view(bsz * self.num_heads, tgt_len, src_len)
        attn = F.softmax(attn, dim=-1)
        out = torch.bmm(F.dropout(attn, self.dropout, self.training), v)
        out = out.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn_weights = None
        if need_weights:
            attn_weights = attn.view(self.num_heads, bsz, tgt_len, src_len).transpose(0, 1)  # <- law padding
        return self.out_proj(out), attn_weights
