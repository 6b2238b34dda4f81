"""Sums over many tiles, which drift where each addition rounds to float32."""

import pytest
import torch

import regard

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

FLOAT32 = torch.finfo(torch.float32).eps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "reduction"),
    [
        pytest.param(1601, 11, regard.Sum(-2), id="sum-of-many-queries"),
        pytest.param(
            1601, 11, regard.Pool(1, 1), marks=pytest.mark.full, id="cell-of-many-queries"
        ),
        pytest.param(11, 3203, regard.Pool(1, 1), marks=pytest.mark.full, id="cell-of-many-keys"),
        pytest.param(3, 3203, regard.Segments([(0, 3)], [(0, 3203)]), id="span-of-many-keys"),
    ],
)
def test_a_sum_over_many_tiles_does_not_drift(
    q_len: int, kv_len: int, reduction: regard.Reduction, device: torch.device
) -> None:
    query, key = (torch.zeros(length, 2, device=device) for length in (q_len, kv_len))
    found = regard.attend(query, key).reduce(reduction, backend="triton")
    exact = {"Sum": q_len / kv_len, "Pool": 1 / kv_len, "Segments": 1.0}[type(reduction).__name__]
    # A few roundings: of a weight, of the sum of its row, and of the answer.
    torch.testing.assert_close(found, torch.full_like(found, exact), rtol=2.5 * FLOAT32, atol=0)
