"""Row normalizers are exact for every row, however little the sinks leave of it."""

import pytest
import torch

import regard
from regard.recording.without_keys import without_keys
from regard.view.tiles.row_normalizers import RowNormalizers

MASKS = {
    "no mask": None,
    "causal": regard.Causal(),
    "window": regard.SlidingWindow(2, 0),
    "gaps": regard.Keep(torch.arange(11 * 11).reshape(11, 11) % 3 != 1),
}


def normalizers(matrix: regard.AttentionMatrix, *aside: int) -> torch.Tensor:
    """Both numbers of each row, then both without some keys: (num_heads, q_len, 4)."""
    both = (matrix, without_keys(matrix, aside))
    return torch.cat([each.reduce(RowNormalizers()) for each in both], -1)


def expected(matrix: regard.AttentionMatrix, aside: list[int]) -> torch.Tensor:
    """The same from all scores, in float64: (num_heads, q_len, 4)."""
    scores = matrix.scores[:].double()
    if matrix.mask is not None:
        scores = scores.masked_fill(~matrix.mask.to_dense(), -torch.inf)
    numbers: list[torch.Tensor] = []
    for some in ([], aside):
        kept = scores.index_fill(-1, torch.tensor(some, dtype=torch.long), -torch.inf)
        maximum = kept.amax(-1)
        reference = maximum.masked_fill(maximum == -torch.inf, 0)
        total = (kept - reference[..., None]).logsumexp(-1)
        numbers += [maximum, total.masked_fill(maximum == -torch.inf, 0)]
    return torch.stack(numbers, -1)


@pytest.mark.parametrize("aside", [[0], [0, 3, 4], list(range(11)), []], ids=str)
@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in MASKS.items()])
def test_the_normalizers_of_a_row_are_those_of_all_its_scores(
    mask: regard.Mask | None, aside: list[int]
) -> None:
    torch.manual_seed(4)
    matrix = regard.attend(*torch.randn(2, 3, 11, 5) * 2, mask=mask)
    found = normalizers(matrix, *aside)
    torch.testing.assert_close(found.double(), expected(matrix, aside), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("distance", [20.0, 69.0, 75.0, 300.0])
def test_what_is_left_beside_a_sink_is_exact_however_little_it_is(
    distance: float, dtype: torch.dtype
) -> None:
    scores = torch.tensor([[distance, 0.5, 0.25, 0.0], [distance, -torch.inf, 1.0, 2.0]])
    matrix = regard.AttentionMatrix.from_scores(scores.to(dtype))
    found = normalizers(matrix, 0)[:, 2:]
    others = scores[:, 1:].double()
    maximum = others.amax(-1)
    log_normalizer = (others - maximum[:, None]).logsumexp(-1)
    within = (
        2e-5 if dtype == torch.float32 else 1e-12
    )  # float32 rounds a distance of 300 by so much
    expected = torch.stack((maximum, log_normalizer), -1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=within)


@pytest.mark.parametrize("level", [-1e9, 1e9, -(2.0**100), 2.0**100], ids=str)
def test_the_log_normalizer_is_not_rounded_away_by_a_large_maximum(level: float) -> None:
    scores = torch.full((2, 3), level)
    found = normalizers(regard.AttentionMatrix.from_scores(scores), 0)
    expected = torch.tensor([level, 3, level, 2])
    expected[1::2] = expected[1::2].log()
    torch.testing.assert_close(found, expected.expand(2, 4), rtol=1e-6, atol=0)


def test_beside_a_sink_bias_what_is_left_is_renormalised() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.25]])
    plain = regard.AttentionMatrix.from_scores(scores)
    query = torch.eye(3)[:1]
    biased = regard.attend(query, scores.mT @ query, scale=1.0, sink_bias=torch.tensor(2.0))
    found, without = (normalizers(matrix, 0)[0] for matrix in (biased, plain))
    assert found[1] > without[1]
    torch.testing.assert_close(found[2:], without[2:])


def test_the_pass_counts_no_keys() -> None:
    assert not RowNormalizers().needs.keys  # a sixth of the time


def test_a_row_that_is_not_numbers_has_none() -> None:
    scores = torch.zeros(2, 3)
    scores[1, 2] = torch.nan
    found = normalizers(regard.AttentionMatrix.from_scores(scores), 0)
    assert found.isnan().all(-1).tolist() == [False, True]
