"""Rows of weights that are 0 when they meet the value are rows without a key."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from models import noise

CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
LATER = (torch.arange(9) > 2)[:, None]
HEADS = torch.tensor([1.0, 0.0, 1.0])[:, None, None]


class Attends(nn.Module):
    """Three heads by hand, with masked scores, and any product of their weights with the value."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor], mask: Tensor = CAUSAL) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.meet, self.mask = meet, mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (3, 4)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        self.weights = (query @ key.mT / 2).masked_fill(~self.mask, -torch.inf).softmax(-1)
        return self.meet(self.weights, value)


def observed(model: Attends, **options: object) -> regard.Recording:
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(noise(2, 9, 12))
    return seen


def by_queries(weights: Tensor, value: Tensor) -> Tensor:
    return torch.cat([part.nan_to_num() @ value for part in weights.split(3, 2)], 2)


def by_heads(weights: Tensor, value: Tensor) -> Tensor:
    each = zip(weights.unbind(1), value.unbind(1), strict=True)
    return torch.stack([part.masked_fill(part.isnan(), 0.0) @ own for part, own in each], 1)


def for_two_values(weights: Tensor, value: Tensor) -> Tensor:
    return weights.nan_to_num() @ value + weights.nan_to_num() @ (2 * value)


def zeroed_for_each_of_two_values(weights: Tensor, value: Tensor) -> Tensor:
    first, second = (weights.nan_to_num() * HEADS for _ in range(2))
    return first @ value + second @ (2 * value)


@pytest.mark.parametrize(
    ("meet", "heads"), [(for_two_values, torch.ones(3)), (zeroed_for_each_of_two_values, HEADS)]
)
def test_edited_weights_that_meet_two_values_are_recorded_each_time(
    meet: Callable[[Tensor, Tensor], Tensor], heads: Tensor
) -> None:
    seen = observed(Attends(meet, LATER & CAUSAL))
    rows = LATER[:, 0] * heads.view(3, 1)
    assert len(seen) == 2
    for matrix in seen.values():
        torch.testing.assert_close(matrix.sum(-1), rows.expand(2, 3, 9))


def test_each_head_by_itself_may_have_rows_without_keys() -> None:
    model = Attends(by_heads, LATER & CAUSAL)
    seen = observed(model)
    recorded = torch.stack([matrix.to_dense() for matrix in seen.values()], 1)
    torch.testing.assert_close(recorded, model.weights.nan_to_num(), atol=1e-6, rtol=0)


def test_a_block_that_has_no_keys_at_all_is_0() -> None:
    seen = observed(Attends(by_queries, LATER & CAUSAL))
    assert any(not bool(matrix.to_dense().any()) for matrix in seen.values())


def test_answers_of_rows_of_0_are_those_of_rows_without_keys() -> None:
    keep = [regard.Sum(-1), regard.Entropy()]
    seen = observed(Attends(lambda weights, value: (weights * HEADS) @ value), keep=keep)
    layer = seen.layers[0]
    torch.testing.assert_close(layer.reduce(keep[0]), HEADS[..., 0].expand(2, 3, 9))
    assert bool((layer.reduce(keep[1])[:, 1] == 0).all())


def test_rows_that_the_mask_hides_already_change_no_mask() -> None:
    seen = observed(Attends(lambda w, v: (w.nan_to_num() * LATER) @ v, LATER.expand(9, 9)))
    assert isinstance(seen[0].mask, regard.Keep)
    torch.testing.assert_close(seen[0].sum(-1), LATER[:, 0].float().expand(2, 3, 9))


def test_zeros_in_what_meets_no_value_hide_nothing() -> None:
    def report(weights: Tensor, value: Tensor) -> Tensor:
        _ = weights * LATER
        return weights @ value

    assert isinstance(observed(Attends(report))[0].mask, regard.Causal)


def test_a_head_that_is_set_to_0_stays_so_over_the_calls_of_a_generation() -> None:
    keys: list[Tensor] = []

    class Cached(Attends):
        def forward(self, x: Tensor) -> Tensor:
            keys.append(self.key(x).unflatten(-1, (3, 4)).transpose(1, 2))
            query = self.query(x).unflatten(-1, (3, 4)).transpose(1, 2)
            key = torch.cat(keys, 2)
            causal = CAUSAL[key.shape[2] - query.shape[2] : key.shape[2], : key.shape[2]]
            scores = (query @ key.mT / 2).masked_fill(~causal, -torch.inf)
            used = scores.softmax(-1) * HEADS
            self.weights = nn.functional.pad(used, (0, 9 - used.shape[-1]))
            return used @ key

    model, parts = Cached(by_heads), list[Tensor]()
    with torch.no_grad(), regard.observe(model) as seen:
        for part in noise(2, 9, 12).split((7, 1, 1), 1):
            model(part)
            parts.append(model.weights)
    torch.testing.assert_close(seen[0].to_dense(), torch.cat(parts, 2), atol=1e-6, rtol=0)
