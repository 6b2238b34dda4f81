# regard.check(FlexDocumentAttention, args=(torch.randn(2, 9, 32), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2]])), causal=True)
# regard.spec(causal=True, heads=2, positions=None, documents=("doc_ids",))
import torch
from torch import nn, Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class FlexDocumentAttention(nn.Module):
    """Causal attention inside documents, with FlexAttention.

    doc_ids: (batch, tokens), the number of the document of each token in each row.
    """

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, doc_ids: Tensor) -> Tensor:
        B, N, D = x.shape

        def document_causal(b, h, q_idx, kv_idx):
            same = doc_ids[b, q_idx] == doc_ids[b, kv_idx]
            return same & (q_idx >= kv_idx)

        block_mask = create_block_mask(document_causal, B, None, N, N, device=x.device)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q.contiguous(), k.contiguous(), v.contiguous(), block_mask=block_mask)
        return self.out(y.transpose(1, 2).reshape(B, N, D))
