"""Files for ``check`` to run, and the error it raises."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from regard.diagnosis.sandbox.sandbox_process import check_apart
from regard.errors import RegardError

RIGHT = """
import torch

def attention(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
"""
WRONG = """
import torch

def attention(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-2) @ v
"""
MODULE = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(b, n, d)
"""


def write(name: str, source: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return name


def trouble(target: str, seconds: float = 20.0, **options: Any) -> str:
    with pytest.raises(RegardError) as error:
        check_apart(target, options, seconds=seconds, gib=1.0)
    return str(error.value)
