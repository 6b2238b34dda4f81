"""Rows of weights that a model sets to 0 after the softmax are rows without a key."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from models import noise

CAUSAL = torch.ones(9, 9).tril()
LATER = (torch.arange(9) > 2)[:, None]
HEADS = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
Change = Callable[[Tensor], Tensor]


class Changing(nn.Module):
    """Three heads by hand, with something done to their weights, whose value is made after it."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.change, self.used = change, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (
            each(x).unflatten(-1, (3, 4)).transpose(1, 2) for each in (self.query, self.key)
        )
        self.used = self.change((query @ key.mT / 2).softmax(-1))
        return self.used @ self.value(x).unflatten(-1, (3, 4)).transpose(1, 2)


def first_row(weights: Tensor) -> Tensor:
    weights[:, :, 0] = 0
    return weights


def both(weights: Tensor) -> Tensor:
    return first_row(weights * HEADS)


def made_to_sum_to_1_again(weights: Tensor) -> Tensor:
    weights = weights * LATER * CAUSAL
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w * LATER, id="product"),
        pytest.param(lambda w: w * HEADS, id="head mask"),
        pytest.param(lambda w: (w.mT * LATER.mT).mT, id="transposed"),
        pytest.param(lambda w: w.masked_fill(~LATER, 0.0), id="fill"),
        pytest.param(lambda w: torch.where(LATER, w, 0.0), id="where"),
        pytest.param(lambda w: w.mul_(LATER), id="product in place"),
        pytest.param(lambda w: w.masked_fill_(~LATER, 0.0), id="fill in place"),
        pytest.param(first_row, id="row in place"),
        pytest.param(both, id="heads and a row"),
    ],
)
def test_rows_that_are_set_to_0_have_weights_of_0(
    change: Change, mode: Callable[[], torch.no_grad]
) -> None:
    model = Changing(change)
    with mode(), regard.observe(model) as seen:
        model(noise(2, 9, 12))
    assert bool((model.used == 0).all(-1).any())
    torch.testing.assert_close(seen[0].to_dense(), model.used, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(made_to_sum_to_1_again, "mul", id="made to sum to 1 again"),
        pytest.param(
            lambda w: w.index_fill(2, torch.tensor([0, 4]), 0.0), "index_fill", id="index_fill"
        ),
    ],
)
def test_rows_that_are_changed_otherwise_are_refused(change: Change, name: str) -> None:
    model = Changing(change)
    reason = f"{name} .* makes others of the weights after their softmax"
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 9, 12))


class Masked(nn.Module):
    """Three heads by hand whose first queries have no key, so that their softmax is NaN."""

    def __init__(self, output: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (3, 4)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = (query @ key.mT / 2).masked_fill(~(LATER & CAUSAL.bool()), -torch.inf)
        return self.output(scores.softmax(-1), value)


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


@pytest.mark.parametrize("output", [by_queries, by_heads])
def test_rows_without_keys_that_are_made_0_part_by_part_are_refused(
    output: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = Masked(output)
    reason = "some of the weights of the softmax .* meet a value on their own"
    with torch.no_grad(), pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 9, 12))


def test_rows_without_keys_may_be_made_0() -> None:
    model = Masked(for_two_values)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(2, 9, 12))
    rows = torch.tensor([0.0] * 3 + [1.0] * 6)
    torch.testing.assert_close(seen[0].sum(-1), rows.expand(2, 3, 9))


def test_the_same_rows_may_be_made_0_for_each_of_two_values() -> None:
    model = Masked(zeroed_for_each_of_two_values)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(2, 9, 12))
    rows = torch.tensor([0.0] * 3 + [1.0] * 6) * HEADS[..., 0]
    torch.testing.assert_close(seen[0].sum(-1), rows.expand(2, 3, 9))


def test_reductions_that_are_asked_as_the_model_runs_know_rows_of_0() -> None:
    model = Changing(lambda weights: weights * HEADS)
    keep = [regard.Sum(-1), regard.Entropy()]
    with torch.no_grad(), regard.observe(model, keep=keep) as seen:
        model(noise(2, 9, 12))
    layer = seen.layers[0]
    torch.testing.assert_close(layer.reduce(keep[0]), model.used.sum(-1), atol=1e-6, rtol=0)
    assert bool((layer.reduce(keep[1])[:, 1] == 0).all())


def test_rows_that_the_mask_hides_already_change_no_mask() -> None:
    class Padded(Changing):
        def forward(self, x: Tensor) -> Tensor:
            query, key = self.query(x), self.key(x)
            scores = (query @ key.mT).masked_fill(~LATER, -torch.inf)
            self.used = scores.softmax(-1).nan_to_num() * LATER
            return self.used @ self.value(x)

    model = Padded(first_row)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(9, 12))
    torch.testing.assert_close(seen[0].to_dense(), model.used, atol=1e-6, rtol=0)
    assert isinstance(seen[0].mask, regard.Keep)


def test_rows_that_chance_sets_to_0_stay_what_the_softmax_gave() -> None:
    def dropped(weights: Tensor) -> Tensor:
        return weights * ((torch.rand(2, 3, 9, 1) < 0.5) / 0.5)

    model = Changing(dropped)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(2, 9, 12))
    assert bool((model.used == 0).all(-1).any())
    assert seen[0].mask is None


def test_rows_that_are_set_to_0_beside_dropout_are_refused() -> None:
    torch.manual_seed(0)
    model = Changing(lambda weights: nn.functional.dropout(weights * HEADS, 0.5))
    with pytest.raises(regard.RegardError) as refusal, torch.no_grad(), regard.observe(model):
        model(noise(2, 9, 12))
    first, remedy = str(refusal.value).splitlines()
    assert first.endswith(
        "rows were set to 0 and others dropped at random; the zeros do not show which."
    )
    assert remedy == "    Observe the model in eval() mode, without dropout."


def test_zeros_in_what_meets_no_value_hide_nothing() -> None:
    class Reporting(Changing):
        def forward(self, x: Tensor) -> Tensor:
            weights = (self.query(x) @ self.key(x).mT).softmax(-1)
            self.used = weights * LATER
            return weights @ x

    model = Reporting(first_row)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(9, 12))
    assert seen[0].mask is None


def test_weights_that_meet_one_value_with_rows_of_0_and_one_without_are_refused() -> None:
    class Twice(Changing):
        def forward(self, x: Tensor) -> Tensor:
            weights = (self.query(x) @ self.key(x).mT).softmax(-1)
            return weights @ x + (weights * LATER) @ self.value(x)

    model = Twice(first_row)
    with pytest.raises(regard.RegardError) as refusal, torch.no_grad(), regard.observe(model):
        model(noise(9, 12))
    first, remedy = str(refusal.value).splitlines()
    assert first.endswith("a matrix has one of them.")
    assert remedy == "    Take the softmax twice, once for each."


def test_zeros_that_are_put_before_some_of_the_rows_are_refused() -> None:
    model = Changing(lambda w: torch.cat([torch.zeros_like(w[:, :, :2]), w[:, :, 2:]], 2))
    with (
        pytest.raises(regard.RegardError, match="makes others of the weights after their softmax"),
        torch.no_grad(),
        regard.observe(model),
    ):
        model(noise(2, 9, 12))


def test_a_head_that_is_set_to_0_stays_so_over_the_calls_of_a_generation() -> None:
    keys: list[Tensor] = []

    class Cached(Changing):
        def forward(self, x: Tensor) -> Tensor:
            keys.append(self.key(x).unflatten(-1, (3, 4)).transpose(1, 2))
            query = self.query(x).unflatten(-1, (3, 4)).transpose(1, 2)
            key = torch.cat(keys, 2)
            causal = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2])
            scores = (query @ key.mT / 2).masked_fill(causal == 0, -torch.inf)
            self.used = self.change(scores.softmax(-1))
            return self.used @ key

    model, x = Cached(lambda weights: weights * HEADS), noise(2, 9, 12)
    with torch.no_grad(), regard.observe(model) as seen:
        used = [_used(model, part) for part in x.split((7, 1, 1), 1)]
    expected = torch.cat([nn.functional.pad(w, (0, 9 - w.shape[-1])) for w in used], 2)
    torch.testing.assert_close(seen[0].to_dense(), expected, atol=1e-6, rtol=0)


def _used(model: Changing, x: Tensor) -> Tensor:
    model(x)
    return model.used
