# regard.check(PackedCausalAttention, args=(torch.randn(2, 9, 24), torch.tensor([[4, 4, 4, 1, 1, 6, 6, 6, 6], [2, 2, 0, 0, 0, 0, 5, 5, 5]])), causal=True)
# regard.spec(causal=True, heads=3, positions="learned", documents=("doc_ids",))
import torch
import torch.nn as nn
import torch.nn.functional as F


class PackedCausalAttention(nn.Module):
    """Causal attention on packed rows with learned positions.

    x: (batch, tokens, dim). doc_ids: (batch, tokens), the number of each token's document; a document is a run of equal
    numbers, which come in no order, and no number comes twice in a row. Positions start at 0 in each document, and no
    token attends to another document.
    """

    def __init__(self, dim=24, heads=3, max_len=32):
        super().__init__()
        self.heads = heads
        self.wpe = nn.Embedding(max_len, dim)
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def positions(self, doc_ids):
        index = torch.arange(doc_ids.size(1), device=doc_ids.device).expand_as(doc_ids)
        first = torch.ones_like(doc_ids, dtype=torch.bool)
        first[:, 1:] = doc_ids[:, 1:] > doc_ids[:, :-1]  # <- law influence
        start = torch.where(first, index, torch.zeros_like(index)).cummax(dim=1).values
        return index - start

    def forward(self, x, doc_ids):
        b, n, c = x.shape
        x = x + self.wpe(self.positions(doc_ids))
        q, k, v = self.in_proj(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        same = doc_ids[:, :, None] == doc_ids[:, None, :]
        allowed = (same & torch.ones(n, n, dtype=torch.bool, device=x.device).tril())[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, c))
