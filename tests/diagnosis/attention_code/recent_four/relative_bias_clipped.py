# regard.check(EventAttention)
# regard.spec(causal=False, heads=4, positions="table")
import torch
import torch.nn as nn


class EventAttention(nn.Module):
    """Bidirectional attention over events of a piano roll, with a bias per head and signed distance.
    Distances beyond +-max_rel share the outermost entries."""

    def __init__(self, d=24, heads=4, max_rel=3):
        super().__init__()
        self.heads, self.max_rel = heads, max_rel
        self.proj = nn.ModuleDict({n: nn.Linear(d, d, bias=n == "o") for n in "qkvo"})
        self.table = nn.Parameter(torch.randn(heads, 2 * max_rel + 1))

    def forward(self, events):
        B, N, D = events.shape
        q, k, v = (self.proj[n](events).view(B, N, self.heads, -1) for n in "qkv")
        step = torch.arange(N, device=events.device)
        rel = (step[None] - step[:, None]).clamp(-self.max_rel, self.max_rel) + self.max_rel
        # (N_k, B, H, N_q) is the layout that our old kernel had
        s = torch.einsum("bqhd,bkhd->kbhq", q, k) / (D // self.heads) ** 0.5
        s = s + self.table[:, rel].permute(2, 0, 1)[:, None]
        w = torch.softmax(s, dim=0)
        return self.proj["o"](torch.einsum("kbhq,bkhd->bqhd", w, v).flatten(2))
