# regard.check(MultiHeadAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_concat = nn.Linear(d_model, d_model)

    def split(self, tensor):
        batch_size, length, d_model = tensor.size()
        d_tensor = d_model // self.n_head
        return tensor.view(batch_size, self.n_head, length, d_tensor)  # <- heads-split-without-transpose

    def concat(self, tensor):
        batch_size, head, length, d_tensor = tensor.size()
        return tensor.transpose(1, 2).contiguous().view(batch_size, length, head * d_tensor)

    def forward(self, x):
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        score = q @ k.transpose(2, 3) / q.size(-1) ** 0.5
        out = torch.softmax(score, dim=-1) @ v
        return self.w_concat(self.concat(out))
