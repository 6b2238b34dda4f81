"""The lazy mean over the heads, in each dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import regard

HEADS, TOKENS = 48, 67

ANSWERS: dict[str, Callable[[Any], Tensor]] = {
    "to_dense": lambda mean: mean if isinstance(mean, Tensor) else mean.to_dense(),
    "window": lambda mean: mean[:, 3:50, 2:60],
    "row": lambda mean: mean[0, 7],
    "part": lambda mean: mean[1] if isinstance(mean, Tensor) else mean[1].to_dense(),
    "product": lambda mean: mean @ torch.linspace(0.5, 1, TOKENS, dtype=mean.dtype),
    "transposed product": lambda mean: torch.linspace(0.5, 1, TOKENS, dtype=mean.dtype) @ mean,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_at_most_twice_the_error_of_plain_pytorch(
    name: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, HEADS, TOKENS, 8, generator=generator).to(dtype) for _ in "qk")
    exact = ANSWERS[name](oracle.attend(query.double(), key.double()).weights.mean(1))
    plain = ANSWERS[name](oracle.attend(query, key).weights.mean(1))
    actual = ANSWERS[name](regard.attend(query, key).mean(1))
    assert actual.dtype == dtype
    within = oracle.allowed_error(exact, plain, dtype=dtype, scores=5.0)
    oracle.assert_close(actual, exact, within)


def test_the_mean_as_a_tensor_has_the_gradient_of_the_definition() -> None:
    query, key = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in "qk")
    found = oracle.gradients(lambda q, k: regard.attend(q, k).mean(1).to_dense(), [query, key])
    right = oracle.gradients(lambda q, k: oracle.attend(q, k).weights.mean(1), [query, key])
    for actual, exact in zip(found, right, strict=True):
        oracle.assert_close(actual, exact, 1e-13)
