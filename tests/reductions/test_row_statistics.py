"""The normalised entropy: 1 where attention is even, whatever hides the other keys."""

import math

import pytest
import torch

import regard
from regard.reductions.row_statistics import NormalizedEntropy


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param({"mask": regard.Causal()}, id="mask"),
        pytest.param({"bias": torch.full((5, 5), -65504.0).triu(1)}, id="float16's lowest number"),
        pytest.param({"bias": torch.full((5, 5), -torch.inf).triu(1)}, id="minus infinity"),
    ],
)
def test_even_attention_to_the_keys_that_are_allowed_is_spread_fully(mask: dict) -> None:
    x = torch.zeros(5, 2)
    spread = regard.attend(x, x, **mask).reduce(NormalizedEntropy())
    torch.testing.assert_close(spread, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))


def test_a_query_without_keys_is_not_spread() -> None:
    x = torch.zeros(2, 1)
    A = regard.attend(x, x, mask=regard.Keep(torch.tensor([[False, False], [True, True]])))
    torch.testing.assert_close(A.reduce(NormalizedEntropy()), torch.tensor([0.0, 1.0]))


def test_beside_a_sink_one_key_is_not_spread_and_more_are_at_most_fully() -> None:
    x = torch.zeros(3, 1)
    A = regard.attend(x, x, mask=regard.Causal(), sink_bias=torch.tensor(0.0))
    assert (A.entropy()[1] / math.log(2)).item() > 1  # of two weights of a third
    expected = torch.tensor([0.0, 1.0, math.log(4) * 3 / 4 / math.log(3)])
    torch.testing.assert_close(A.reduce(NormalizedEntropy()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_weights_of_a_gpu_are_those_of_a_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU, comparing equal scores would wait for the device, so they are ranked otherwise.
    monkeypatch.setattr("regard.reductions.largest.reads_without_sync", lambda _scores: False)
    numbers = [-1.0, 0.0, 2.0, -0.0, -torch.inf, 2.0, -3.0, -1.0, 0.0, -2.5]
    scores = torch.tensor(numbers, dtype=dtype).expand(2, 1, -1)
    top = regard.AttentionMatrix.from_scores(scores).reduce(regard.TopK(9), backend="sweep")
    assert top.indices.tolist() == [[[2, 5, 1, 3, 8, 0, 7, 9, 6]]] * 2
