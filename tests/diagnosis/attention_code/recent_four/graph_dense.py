# regard.check(GraphTransformerConv, args=(torch.randn(2, 6, 16), (torch.rand(2, 6, 6) < 0.4).float()), means={'adjacency': 'True keeps'})
# regard.spec(causal=False, heads=4, positions=None, padding={"adjacency": "True keeps"})
import torch
from torch import nn


class GraphTransformerConv(nn.Module):
    """Transformer layer on a dense batch of graphs (Dwivedi & Bresson, without edge features).

    nodes      (batch, N, channels)
    adjacency  (batch, N, N); adjacency[b, i, j] != 0 lets node i collect from node j. A node always sees itself,
               whether or not the diagonal is filled.
    """

    def __init__(self, channels=16, heads=4):
        super().__init__()
        self.heads = heads
        self.lin_query = nn.Linear(channels, channels)
        self.lin_key = nn.Linear(channels, channels)
        self.lin_value = nn.Linear(channels, channels)

    def forward(self, nodes, adjacency):
        B, N, C = nodes.shape
        q = self.lin_query(nodes).view(B, N, self.heads, -1)
        k = self.lin_key(nodes).view(B, N, self.heads, -1)
        v = self.lin_value(nodes).view(B, N, self.heads, -1)
        edges = (adjacency != 0) | torch.eye(N, dtype=torch.bool, device=nodes.device)
        alpha = torch.einsum("bihc,bjhc->bijh", q, k) / (C // self.heads) ** 0.5
        alpha = alpha.masked_fill(~edges[..., None], float("-inf")).softmax(dim=2)
        return torch.einsum("bijh,bjhc->bihc", alpha, v).reshape(B, N, C)
