"""Values of float64 stay as they are: what compares the values of calls reads them alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard


class Attention(nn.Module):
    """Attention whose value the model uses again."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            return scaled_dot_product_attention(query, key, value), value * 1
        return (query @ key.mT / 2).softmax(-1) @ value, value * 1


@pytest.mark.parametrize("fused", [False, True], ids=["by hand", "fused"])
@pytest.mark.parametrize("keep", ["qk", "qkv"])
def test_a_value_of_float64_is_left_as_it_is(keep: str, fused: bool) -> None:
    model = Attention(fused)
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    before = value.clone()
    plain = model(query, key, value)
    with regard.observe(model, keep=keep) as seen:
        observed = model(query, key, value)
        model(query[:, :, :1], key, value)
    assert torch.equal(value, before)
    assert all(map(torch.equal, plain, observed))
    if keep == "qkv":
        assert torch.equal(seen.value(0), before)
