# regard.check(AttentionCausale)
# regard.spec(causal=True, heads=2, positions=None)
# TP 4 : un petit modèle de langue. Ne pas oublier le masque !
import torch
from torch import nn


class AttentionCausale(nn.Module):
    """Attention causale à plusieurs têtes : le mot i ne regarde que les mots 0..i (lui-même compris)."""

    def __init__(self, taille=16, tetes=2):
        super().__init__()
        self.tetes = tetes
        self.qkv = nn.Linear(taille, 3 * taille, bias=False)
        self.sortie = nn.Linear(taille, taille)

    def forward(self, x):
        lot, mots, taille = x.shape
        q, k, v = self.qkv(x).reshape(lot, mots, 3, self.tetes, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / (taille // self.tetes) ** 0.5
        permis = torch.tril(torch.ones(mots, mots, device=x.device), diagonal=1).bool()  # <- causal-off-by-one
        poids = scores.masked_fill(~permis, float("-inf")).softmax(dim=-1)
        return self.sortie(torch.matmul(poids, v).transpose(1, 2).reshape(lot, mots, taille))
