"""What turns scores into weights: exact for every row, however little the sinks leave of it."""

import pytest
import torch

import regard
from regard.view.tiles.row_normalizers import RowNumbers

MASKS = {
    "no mask": None,
    "causal": regard.Causal(),
    "window": regard.SlidingWindow(2, 0),
    "gaps": regard.Keep(torch.arange(11 * 11).reshape(11, 11) % 3 != 1),
}


def expected(matrix: regard.AttentionMatrix, aside: list[int]) -> torch.Tensor:
    """The same from all scores, in float64: (num_heads, q_len, 4)."""
    scores = matrix.scores[:].double()
    if matrix.mask is not None:
        scores = scores.masked_fill(~matrix.mask.to_dense(), -torch.inf)
    numbers: list[torch.Tensor] = []
    for some in ([], aside):
        kept = scores.index_fill(-1, torch.tensor(some, dtype=torch.long), -torch.inf)
        logsumexp = kept.logsumexp(-1)
        highest = (kept.amax(-1) - logsumexp).exp().nan_to_num(0.0)
        numbers += [logsumexp, highest]
    return torch.stack(numbers, -1)


@pytest.mark.parametrize("aside", [[0], [0, 3, 4], list(range(11)), []], ids=str)
@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in MASKS.items()])
def test_the_numbers_of_a_row_are_those_of_all_its_scores(
    mask: regard.Mask | None, aside: list[int]
) -> None:
    torch.manual_seed(4)
    matrix = regard.attend(*torch.randn(2, 3, 11, 5) * 2, mask=mask)
    found = matrix.reduce(RowNumbers(tuple(aside)))
    torch.testing.assert_close(found.double(), expected(matrix, aside), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distance", [20.0, 69.0, 75.0, 300.0])
def test_what_is_left_beside_a_sink_is_exact_however_little_it_is(distance: float) -> None:
    scores = torch.tensor([[distance, 0.5, 0.25, 0.0], [distance, -torch.inf, 1.0, 2.0]])
    matrix = regard.AttentionMatrix.from_scores(scores)
    found = matrix.reduce(RowNumbers((0,)))[:, 2:]
    others = scores[:, 1:].double()
    logsumexp = others.logsumexp(-1)
    torch.testing.assert_close(found[:, 0].double(), logsumexp, rtol=0, atol=2e-5)
    highest = (others.amax(-1) - logsumexp).exp()
    torch.testing.assert_close(found[:, 1].double(), highest, rtol=2e-5, atol=0)


def test_beside_a_sink_bias_what_is_left_is_renormalised() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.25]])
    plain = regard.AttentionMatrix.from_scores(scores)
    query = torch.eye(3)[:1]
    biased = regard.attend(query, scores.mT @ query, scale=1.0, sink_bias=torch.tensor(2.0))
    found, without = (matrix.reduce(RowNumbers((0,)))[0] for matrix in (biased, plain))
    assert found[0] > without[0]
    torch.testing.assert_close(found[2:], without[2:])


def test_a_row_that_is_not_numbers_has_none() -> None:
    scores = torch.zeros(2, 3)
    scores[1, 2] = torch.nan
    found = regard.AttentionMatrix.from_scores(scores).reduce(RowNumbers((0,)))
    assert found.isnan().all(-1).tolist() == [False, True]
