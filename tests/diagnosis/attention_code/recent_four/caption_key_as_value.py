# regard.check(CaptionCrossAttention)
# regard.spec(heads=2, positions=None)
# Cross-attention used in our captioning model. Text queries attend to image regions.
import torch
import torch.nn as nn

class CaptionCrossAttention(nn.Module):
    def __init__(self, text_dim=32, image_dim=32, inner=32, heads=2):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(text_dim, inner)
        self.k_proj = nn.Linear(image_dim, inner)
        self.v_proj = nn.Linear(image_dim, inner)
        self.out_proj = nn.Linear(inner, text_dim)

    def _split(self, t):
        return t.reshape(t.shape[0], t.shape[1], self.heads, -1).swapaxes(1, 2)

    def forward(self, text, image):
        q = self._split(self.q_proj(text))
        k = self._split(self.k_proj(image))
        v = self._split(self.k_proj(image))  # <- wrong-projection
        att = torch.softmax(q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        return self.out_proj((att @ v).swapaxes(1, 2).flatten(2))
